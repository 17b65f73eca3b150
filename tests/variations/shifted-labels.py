import torch

import uefl
from common.train import Trainer

CUT = "--partition silos --silos 1 1 --silo-size 30 --model cnn --width 0.125 --local-epochs 1 "
CUT += "--rounds 1 --iterations 2 --passes 1 --compare --out run"


def test_the_last_silo_has_the_next_label_and_the_data_stay_as_they_are(start, tiny, monkeypatch):
    seen, train = [], Trainer.train

    def spy(self, *args, **options):
        seen.append((self.y.clone(), self.clients))
        return train(self, *args, **options)

    monkeypatch.setattr(Trainer, "train", spy)
    start(uefl, CUT)
    for y, clients in seen:  # of the run and of its baselines, which share the data
        expected, last = tiny.y.clone(), torch.cat([clients.train[-1], clients.test[-1]])
        expected[last] = torch.tensor([1, 2, 0])[tiny.y[last]]
        assert torch.equal(y, expected)
    assert len(seen) > 2
