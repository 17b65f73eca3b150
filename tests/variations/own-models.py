import numpy as np
import pytest
import torch

import fedavg

CUT = "--model cnn --width 0.125 --partition iid --clients 3 --participating 3 --sample 2 "
CUT += "--held-out 0.4 --lr 0.1 --rounds 1 --no-compare "


def test_own_models_are_tested_before_averaging(finished):
    run = finished(fedavg, CUT)
    (selected,), right = run.selected, []
    ends, _ = run.trainer.train(
        fedavg.client_update, run.trainer.initial, torch.tensor(selected), 1
    )
    for k, theta in zip(selected, ends, strict=True):
        samples = run.clients.test[k]
        answers = run.trainer.predict(theta, samples)[1]
        right += (answers == run.data.y[samples]).tolist()
    assert float(run.rows[0]["id_selected"]) == pytest.approx(np.mean(right), abs=1e-5)
