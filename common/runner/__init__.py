"""What surrounds a run: flags, folders, tables and pictures.

A method can be understood without these files. A new run passes through them in this order: flags,
compare, runs, and then table and plots.
"""

import os
import signal
import socket
import sys
from pathlib import Path

import torch

from common import UserError, ranks
from common.ranks import say


def launch(main):
    """Runs a program from the command line, where it may fork itself.

    Exit codes: 2 is a user's mistake, 130 is Ctrl-C or SIGTERM, and 1 is an error of the operating
    system, such as a full disk, or another process that has ended. Each of these is one line on
    stderr.
    """
    ranks.may_fork = sys.platform == "linux"
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115  (a shell's 2>&-)
        stream.reconfigure(errors="backslashreplace")  # a table must not fail at a name or a sign
        setattr(sys, name, stream)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(1)  # see devices.set_up
    socket.setdefaulttimeout(60)  # for a download that does not answer
    try:
        ranks.connect()  # torchrun's ranks meet first, so that all see it if a mistake ends one
        main()
        ranks.disconnect()
        return
    except UserError as e:
        code = 2
        error = e
    except OSError as e:
        code = 1
        error = e
    except KeyboardInterrupt as e:
        code = 130
        error = e
    except (RuntimeError, MemoryError) as e:
        code = 1
        error = "another process has ended, so this one stops"
        if "memory" in str(e):
            error = "memory is short: lower --image-size, --batch-size or --processes"
        elif "gloo" not in str(e):
            raise
    lines = [str(error) or "stopped", *getattr(error, "__notes__", [])]
    say(f"\n{Path(sys.argv[0]).name}: {'; '.join(lines)}")
    sys.exit(code)
