"""What a server does with uploads, whichever clients it has selected: weights, averages, a table, and who is away.

The table of the clients' latest updates [M, P] is what a server's memory goes to (8.6 MB a client for the `cnn` on
CIFAR-10, in float32). Half of that with --table-dtype bfloat16; --sketch N keeps N numbers a client instead of P.
"""

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from common import UserError, flags, random_at
from common.data import Dataset
from common.run import Run
from common.splits import Clients, label_counts
from common.train import Trainer


def base_weights(weighting: str, data: Dataset, clients: Clients) -> Tensor:
    """Every client's weight before it is divided by the sum over the selected [N].

    "size" is n_k, "equal" 1, and "entropy" exp of the entropy of its labels (Wu et al., equation 14).
    """
    if weighting == "size":
        return clients.sizes
    if weighting == "equal":
        return torch.ones(len(clients.train))
    p = label_counts(data, clients.train)
    p = p / p.sum(1, keepdim=True)
    return torch.exp(-torch.xlogy(p, p).sum(1))


def trimmed_mean(updates: Tensor, share: float) -> Tensor:
    """[K, P] -> [P]: each coordinate's mean without its int(share K) largest and as many smallest (Yin et al. 2018).

    At least one is cut at either end, where that leaves any.
    """
    k = len(updates)
    cut = min(max(1, int(share * k + 1e-9)), (k - 1) // 2)
    return updates.sort(0).values[cut : k - cut].mean(0)


def aggregate(updates: Tensor, alpha: Tensor, trim: float) -> Tensor:
    """Clients' updates [K, P] -> one [P]: weighted by alpha [K], or their trimmed mean where trim is above 0."""
    return trimmed_mean(updates, trim) if trim else alpha.to(updates) @ updates


def table_flags(add) -> None:
    """The flags of a server that keeps a table."""
    add("--weighting", choices=["equal", "size", "entropy"], default="equal", help="alpha of line 7")
    add("--event-threshold", type=flags.at_least(0, float), default=0.0, help="upload what changed by this share only")
    add("--churn", type=flags.at_least(0, float, 0.99), default=0.0, help="probability to be away in a round")
    add("--trim", type=flags.at_least(0, float, 0.49), default=0.0, help="share cut at either end: the trimmed mean")
    add("--table-dtype", choices=["float32", "bfloat16"], default="float32", help="of the table of latest gradients")
    add("--sketch", type=flags.at_least(0), default=0, metavar="N", help="keep N random sums of each; 0: all of it")


def without_effect(args) -> dict:
    """As flags.parse() takes it."""
    return {"weighting": bool(args.trim) and "the mean of --trim has no weights"}


def empty_table(m: int, w: Tensor, args) -> dict:
    """What a server that has seen none of m clients remembers of them; args as table_flags() gives them.

    table [M, P or sketch] latest updates, products [M, M] of its rows, seen, uploads (their number). Raises UserError
    where the flags do not fit.
    """
    if args.sketch and args.event_threshold:
        raise UserError("--event-threshold averages old gradients, which a --sketch does not keep: choose one of them")
    return {
        "table": torch.zeros(m, args.sketch or len(w), dtype=getattr(torch, args.table_dtype), device=w.device),
        "products": torch.zeros(m, m, dtype=torch.float64, device=w.device), "seen": [False] * m, "uploads": 0,
    }  # fmt: skip


def enter(state: dict, rows: Tensor, updates: Tensor, seed: int) -> None:
    """Writes the updates [K, P] of the clients of these rows [K] into the table, and their inner products.

    Zeros have no direction to compare: a client that sends them counts as not seen, and will enter again.
    """
    kept = updates if updates.shape[1] == state["table"].shape[1] else sketch(updates, state["table"].shape[1], seed)
    state["table"][rows] = kept.to(state["table"].dtype)
    update_products(state["products"], state["table"], rows)
    for row in rows.tolist():
        state["seen"][row] = bool(state["products"][row, row] > 0)
    state["uploads"] += len(rows)


def available_rows(state: dict, t: int, args, log: Run, trainer: Trainer, model: nn.Module, clients: Clients) -> Tensor:
    """The clients available in round t that have a usable update in the table, as its row numbers.

    An available client without one (none yet, or all zeros) first trains from the current w and enters the table: in
    round 1 all of them (Wu et al., Algorithm 2, line 1).
    """
    everyone = clients.participating
    here = available(torch.arange(len(everyone)), args.churn, random_at(args.seed, "churn", t))
    new = torch.tensor([i for i in here.tolist() if not state["seen"][i]], dtype=torch.long)
    if len(new):
        with log.extra_work(f"{len(new)} clients enter the table", len(new) / args.sample) as tick:
            joined, updates, _ = trainer.local_updates(
                model, state["w"], everyone[new], clients.train, 0, progress=tick, needed=0
            )
        enter(state, torch.searchsorted(everyone, joined), updates, args.seed)
    return known(state, here)


def known(state: dict, here: Tensor) -> Tensor:
    """Those of the rows `here` that an upload has filled. Raises UserError where there are none."""
    rows = [i for i in here.tolist() if state["seen"][i]]
    if not rows:
        raise UserError(
            "no client sent an update that can be used: if they are not finite, lower --lr; if all are zero, raise it"
        )
    return torch.tensor(rows)


def update_products(products: Tensor, table: Tensor, changed: Tensor) -> None:
    """Brings the inner products [M, M] of the table's rows [M, P] up to date after `changed` [K]: K M P of them."""
    changed = changed.to(table.device)
    new = torch.zeros(len(changed), len(table), dtype=torch.float64, device=table.device)
    for part in table.split(2**11, dim=1):  # in bfloat16 a part's sums are rounded, but not the sum over parts
        new += part[changed] @ part.T
    products[changed] = new.to(products)
    products[:, changed] = new.T.to(products)


def cosines(products: Tensor) -> Tensor:
    """Inner products [M, M] -> cosine similarities; 0 to a row of zeros."""
    length = products.diagonal().sqrt()
    return (products / (length[:, None] * length)).nan_to_num(0.0)


def sketch(updates: Tensor, size: int, seed: int) -> Tensor:
    """[K, P] -> [K, size], which keeps inner products up to about 1 / sqrt(size) of the norms (Charikar et al. 2002).

    Each of the P coordinates is added to, or subtracted from, one of `size` sums, drawn at random.
    """
    rng = random_at(seed, "sketch")
    into = torch.from_numpy(rng.integers(size, size=updates.shape[1]))
    sign = torch.from_numpy(rng.integers(2, size=updates.shape[1], dtype=np.int8)) * 2 - 1
    into, sign = into.to(updates.device), sign.to(updates.device)
    sums = torch.zeros(len(updates), size, dtype=torch.float64, device=updates.device)
    for of_client, update in zip(sums, updates, strict=True):  # one at a time, for in float64 all would take 2 [K, P]
        of_client.index_add_(0, into, update.double() * sign)  # float64: a GPU adds in any order, and ranks must agree
    return sums.to(updates)


def upload(state: dict, rows: Tensor, updates: Tensor, args) -> Tensor:
    """The selected clients of these rows [K] upload their updates [K, P]; returns what the server then has of them.

    That is the updates, but for event-triggered uploads: a client whose update is off its old one by less than
    args.event_threshold, relative to the old one's norm, uploads nothing, and its old one counts.
    """
    if args.event_threshold:
        old = state["table"][rows].to(updates)
        moved = (updates - old).norm(dim=1) >= args.event_threshold * old.norm(dim=1)
        updates = torch.where(moved[:, None], updates, old)
        enter(state, rows[moved.cpu()], updates[moved], args.seed)
    else:
        enter(state, rows, updates, args.seed)
    return updates


def available(participating: Tensor, churn: float, rng: np.random.Generator) -> Tensor:
    """Who of `participating` [M] is there this round, each being away with probability `churn`; at least one stays."""
    at_home = rng.random(len(participating)) >= churn
    if not at_home.any():
        at_home[rng.integers(len(participating))] = True
    return participating[torch.from_numpy(at_home)]
