"""Trains the clients of a round, and evaluates models.

A method says what a client does, in a function such as `client_update`. The trainer says where, in
which order and in which precision it runs. A model travels as one vector theta [P]: its parameters
in their order, then its floating-point buffers (the statistics of batch norm).
"""

from dataclasses import dataclass
from functools import cached_property
from types import MethodType

import torch
import torch.nn.functional as F

from common import RunError, UserError, random_at, ranks
from common.devices import seeded
from common.folders import say_once
from common.splits import shuffled

ADVICE = (
    "lower --lr, or the weight of the method's own penalty if it has one; or for what a client "
    "lacks, return 0 as a loss, and counts instead of a share"
)

ENOUGH = 10  # with fewer held-out samples an accuracy says little about a client


class Batches:
    """A client's batches (x, y), which can be walked once: those of training are of all epochs."""

    def __init__(self, pairs):
        self.pairs = pairs

    def __iter__(self):
        return self

    def __next__(self):
        if not self.pairs:  # a loop that starts now would find nothing, and train on nothing
            raise UserError("batches of all epochs are walked again: use [*batches], or islice")
        try:
            return next(self.pairs)
        except StopIteration:
            self.pairs = None
            raise


def local_solver(model, batches, optimizer):
    """Plain local training of one client, for papers that leave it open. Returns the mean loss."""
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def averaging_weights(by, sizes):
    """alpha_k of clients with these numbers of samples [K]: n_k / n by "size", or 1 / K: [K]."""
    n = sizes if by == "size" else torch.ones_like(sizes)
    return n / n.sum()


def weights_of(model):
    """The tensors that theta consists of, in their order."""
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    return [*model.parameters(), *statistics]


@torch.no_grad()
def get_weights(model):
    """A copy of the model's weights as theta [P], float32."""
    return torch.cat([t.reshape(-1) for t in weights_of(model)])


@torch.no_grad()
def set_weights(model, theta):
    """Writes theta [P] into the model."""
    for name, buffer in model.named_buffers():
        if name.endswith("num_batches_tracked"):  # of batch norm: unused, and not in theta
            buffer.zero_()
    for t, part in zip(weights_of(model), unflatten(model, theta)):
        t.copy_(part)


def unflatten(model, theta):
    """Views of theta [P] in the shapes of the model's parameters, then of its buffers."""
    tensors = weights_of(model)
    parts = theta.split([t.numel() for t in tensors])
    return [part.view_as(t) for t, part in zip(tensors, parts)]


@dataclass
class LocalTraining:
    """How a client trains: passes over its data, samples in a step, and the optimizer.

    The optimizer ("sgd" or "adam") is new for each client in each round, so momentum starts from
    zero.
    """

    epochs: int = 5
    batch_size: int = 32
    lr: float = 0.05
    optimizer: str = "sgd"
    momentum: float = 0.0


class Trainer:
    """Local training and evaluation of these clients, with one model for all of them.

    data            a Dataset, whose images and labels go to the device; `y` is a copy
    clients         see splits.Clients
    model           a module; it gets the weights of whoever trains or is evaluated
    local           a LocalTraining, which may be set anew in each round
    seed            of all draws of batches
    precision       "bfloat16": the model's forward pass runs under autocast, while weights, losses
                    and the server stay in float32; "float32": see devices.set_up
    rounds          evaluate() measures in this round, and in every `evaluate_every`-th one
    progress        called with a round and the share of its training that has just been done

    parameters      how many of theta's P numbers are parameters; they come before the statistics
    samples         how many training samples all clients have processed so far
    megabytes       how much has gone between the server and the clients so far, up and down
    t               the round in which clients trained last
    """

    def __init__(
        self,
        data,
        clients,
        model,
        device="cpu",
        local=None,
        seed=0,
        precision="float32",
        evaluate_every=1,
        rounds=None,
        progress=lambda t, share: None,
    ):
        self.x, self.y, self.labels = data.x.to(device), data.y.to(device, copy=True), data.y
        self.classes = len(data.classes)
        self.clients, self.device = clients, torch.device(device)
        self.model = model.to(device, memory_format=torch.channels_last)
        self.local, self.seed = local or LocalTraining(), seed
        self.evaluate_every, self.rounds, self.progress = evaluate_every, rounds, progress
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.samples, self.megabytes, self.t, self.walked = 0, 0.0, 0, 0
        # Autocast for the forward pass alone, because FedIIR computes gradients inside of its loss
        for part in {self.model, getattr(model, "features", model)}:
            vars(part).pop("forward", None)  # of another trainer
            if precision == "bfloat16":
                forward = torch.autocast(self.device.type, torch.bfloat16)(type(part).forward)
                part.forward = MethodType(forward, part)  # a copy of the model has its own
        most = 5_000_000 // data.x[0, 0].numel()  # by pixels: 99 images of 224 x 224
        # The batch size of the evaluation
        self.chunk = max(1, min(most, 1000 if self.device.type == "cuda" else 250))

    @cached_property
    def initial(self):
        """The weights [P] that the model had before the trainer gave it others."""
        return get_weights(self.model)

    def _load(self, theta):
        self.initial  # noqa: B018  (read it before it is overwritten)
        set_weights(self.model, theta)

    def batch(self, positions):
        """The samples at these positions: images as float32 in -1..1, and their labels."""
        x = self.x[positions].to(memory_format=torch.channels_last)
        return x.float().div_(127.5).sub_(1), self.y[positions]

    def train(
        self,
        client_update,
        theta,
        selected,
        t,
        /,  # so that an option of client_update can have one of these names, such as theta
        per_client={},  # noqa: B006  (nobody changes it)
        sent=None,
        **options,
    ):
        """The selected clients, int64 [K], train from theta [P] in round t, on their own samples.

        client_update  called as client_update(model, batches, optimizer, ...), where the model has
                       the weights theta; trains it on the batches (x, y), and returns the mean loss
        per_client     name -> one value per client id, for client_update as a keyword argument
        sent           how many numbers of theta a client receives and returns, one or [K]: by
                       default all
        options        keyword arguments of client_update that are the same for all clients

        Returns the clients' weights [K, P] and losses [K] on the device. Raises RunError if a
        client's weights or loss are not finite, and UserError if somebody is selected who does not
        participate, or if the processes do not agree on clients and weights. On a CPU, the rounds
        0, 1, 2, 4, 8 and so on, and the round `rounds`, end with a check, see _check.
        """
        selected, m = torch.as_tensor(selected, dtype=torch.long), self.clients.participating
        self.t = t
        if t and not len(selected):  # the average of nothing would be a model of zeros
            raise UserError(f"nobody was selected in round {t}: select one client at least")
        if (selected >= m).any():
            raise UserError(f"round {t} selects {selected.tolist()}: only 0 to {m - 1} participate")
        sizes = [len(self.clients.train[k]) for k in selected]
        mine = self._mine(theta, selected, sizes)  # the other processes train the other clients
        uploads = theta.new_zeros(len(selected), len(theta) + 2)  # weights, loss and samples
        learning = [p.requires_grad for p in self.model.parameters()]  # a client may freeze some

        def train_one(i):
            k = int(selected[i])
            self.walked = 0  # how many samples its batches have had
            self._load(theta)
            self.model.train()
            batches, optimizer = Batches(self._batches(k, t)), self._optimizer()
            own = self._own(per_client, k)
            with seeded(self.device, self.seed, "dropout", t, k):  # the same on any process
                loss = client_update(self.model, batches, optimizer, **own, **options)
            for p, learns in zip(self.model.parameters(), learning):
                p.requires_grad, p.grad = learns, None
            try:
                loss = torch.as_tensor(loss).view(1)
            except Exception as e:  # of None, a tuple or a dict
                raise UserError("client_update returns no number: return the mean loss") from e
            uploads[i, -1] = self.walked
            return torch.cat([get_weights(self.model), loss.to(theta)])

        for i in mine:
            uploads[i, :-1] = train_one(i)
            self.progress(t, 1 / len(mine))
        ranks.add_up(uploads)
        p = self.parameters  # the statistics of batch norm move without learning
        if any(torch.equal(upload[:p], theta[:p]) for upload in uploads):
            say_once("\na client has learned nothing: its parameters are those that it got")
        self.count(selected, 0, 2 * len(theta) if sent is None else 2 * sent)
        self.samples += int(uploads[:, -1].double().sum())
        # The first one, if any. A norm is infinite before the weights are
        for k in selected[~uploads.norm(dim=1).isfinite().cpu()]:
            raise RunError(f"client {k} diverged in round {t}: {ADVICE}")
        self._check(t, selected, lambda: [train_one(0)], uploads[:1, :-1])
        return uploads[:, :-2], uploads[:, -2]

    def map(
        self,
        function,
        theta,
        ids,
        samples,
        t,
        /,
        per_client={},  # noqa: B006
        **options,
    ):
        """What `function` computes for each of these clients, int64 [K].

        samples   for each client id the positions of the samples that it computes on, int64
        function  called as function(model, batches, ...), where the model already has the weights
                  theta, and the batches are all of samples[client], in order; returns a tensor or
                  a tuple of tensors
        per_client, options  as for train()
        t         with a client the address of random draws: a call with the same t draws the same

        Returns for each of these tensors the results of the K clients, [K, ...]. Raises RunError if
        one is not finite.
        """
        self._load(theta)

        def compute(i):
            k = int(ids[i])
            self.model.eval()
            pieces = samples[k].to(self.device).split(self.chunk)
            batches = Batches(self.batch(piece) for piece in pieces)
            own = self._own(per_client, k)
            with seeded(self.device, self.seed, "evaluation", t, k):
                found = function(self.model, batches, **own, **options)
            return found if isinstance(found, tuple) else (found,)

        mine = self._mine(theta, ids, [len(samples[k]) for k in ids])
        columns = zip(*ranks.gather({i: compute(i) for i in mine}), strict=True)
        results = [finite(torch.stack(column).to(self.device)) for column in columns]
        self._check(t, ids, lambda: compute(0), [result[0] for result in results])
        return results

    def _mine(self, theta, ids, sizes):
        """Which of these pieces of work this process does.

        Raises UserError if the others have other weights or clients, because then each would do a
        part of another work, and the sum would be nonsense.
        """
        if ranks.COUNT > 1:
            checksum = theta.contiguous().view(torch.int32).sum().item()
            facts = {"clients": [int(k) for k in ids], "weights": checksum}
            when = f"in or after round {self.t} "
            ranks.agree(facts, when, "draw with random_at, read no clock, and train in each one")
        return ranks.share_out(sizes)

    def _check(self, t, ids, again, first):
        """Raises UserError if the first client comes to something else when it computes again.

        It does so in each process, on a CPU, in the rounds 0, 1, 2, 4, 8 and so on, and `rounds`.
        """
        if self.device.type != "cpu" or not len(ids) or (t & (t - 1) and t != self.rounds):
            return
        if not all(ranks.exchange(all(map(torch.equal, again(), first)))):
            raise UserError(
                f"client {ids[0]} comes to something else if it computes again: give it as "
                "arguments what it keeps, leave no hook, draw with random_at, use no clock, and "
                "keep its weights in float32"
            )

    def _own(self, per_client, k):
        """Client k's value in each of these tables. Raises UserError if one is too short."""
        for name, values in per_client.items():
            if isinstance(values, list | torch.Tensor) and len(values) < self.clients.participating:
                raise UserError(f"{name} has {len(values)} values: per_client takes them by id")
        return {name: values[k] for name, values in per_client.items()}

    def count(self, ids, passes=0, numbers=0):
        """Adds to the cost what these clients did, int64 [K].

        passes   over a client's training samples
        numbers  of four bytes that a client has received and sent, one or [K]
        """
        self.samples += int(passes * self.clients.sizes[ids].sum())
        self.megabytes += 4e-6 * float(torch.as_tensor(numbers).expand(len(ids)).sum())

    def cost(self):
        """The two columns of metrics.csv that say what the run has cost so far."""
        return {"samples": self.samples, "megabytes": self.megabytes}

    def _optimizer(self):
        local, parameters = self.local, self.model.parameters()
        if local.optimizer == "adam":
            return torch.optim.Adam(parameters, local.lr, fused=True)
        return torch.optim.SGD(parameters, local.lr, local.momentum, fused=True)

    def _batches(self, k, t):
        """A client's batches: in each epoch consecutive slices of a new random order.

        An epoch's last slice may be smaller.
        """
        samples, epochs = self.clients.train[k], self.local.epochs
        rng = random_at(self.seed, "batches", t, k)
        orders = torch.stack([shuffled(samples, rng) for _ in range(epochs)])
        for order in orders.to(self.device):  # all epochs in one copy
            for positions in order.split(self.local.batch_size):
                self.walked += len(positions)
                yield self.batch(positions)

    def is_due(self, t):
        """Whether round t is evaluated."""
        return t % self.evaluate_every == 0 or t == self.rounds

    def evaluate(self, theta, t, selected, losses):
        """What is to be seen after round t, by column of metrics.csv.

        selected         the clients that have trained, int64 [K]
        train_loss       the mean of their losses [K]
        samples, megabytes  what the run has cost so far: see Trainer

        The others are measured in the rounds that are due:

        accuracies       on each participating client's held-out samples [M]
        id_accuracy      on the held-out samples of all participating clients together
        id_selected      the same for the clients selected in this round, int64 [K]: Wu et al.'s ID
        unseen_accuracies, unseen_accuracy, unseen_worst, participation_gap
                         of the clients that never train, see unseen_columns()
        ood_accuracy     on clients.tests["ood"], and so on for the other test sets there
        confusion        how many samples of class i are called j, [classes, classes], in the OOD
                         samples, or without these in those of id_accuracy
        selected_size    mean number of training samples of the selected clients
        rare_selected    which share of them holds a rare class, if there are rare classes
        """
        clients = self.clients
        row = {"selected": selected, "train_loss": losses.mean(), **self.cost()}
        if not self.is_due(t):
            return row
        # With --held-out 0, nobody has a test sample
        m = clients.participating if any(map(len, clients.test)) else 0
        parts = [*clients.test[:m], *clients.tests.values()]
        answers = self._confusions(theta, parts)
        if m:
            row["id_selected"] = accuracy(answers[selected].sum(0))
        row |= accuracy_columns(answers[:m], dict(zip(clients.tests, answers[m:])))
        if m and len(clients.test) > m:
            row |= unseen_columns(self._confusions(theta, clients.test[m:]), row["id_accuracy"])
        row["selected_size"] = clients.sizes[selected].mean()
        if "rare" in clients.tests:
            rare = [clients.groups[k] != "more classes" for k in selected]
            row["rare_selected"] = sum(rare) / len(rare)
        return row

    def _confusions(self, theta, parts):
        """The confusion of the model with weights theta on each of these parts: [parts, C, C]."""
        _, predicted = self.predict(theta, torch.cat(parts))
        guesses = predicted.split([len(part) for part in parts])
        counts = [confusion(self.labels[s], g, self.classes) for s, g in zip(parts, guesses)]
        return torch.stack(counts)

    @torch.no_grad()
    def predict(self, theta, samples):
        """The model with weights theta on these samples of the pool, int64 [n].

        Returns their cross-entropies [n] and the predicted classes, int64 [n], on the CPU. Raises
        RunError if a loss is not finite, because the largest of NaN logits would count as class 0,
        and UserError as for train().
        """
        self._load(theta)
        self.model.eval()
        batches, results = samples.to(self.device).split(self.chunk), {}  # all in one copy
        for i in self._mine(theta, range(len(batches)), [len(batch) for batch in batches]):
            x, y = self.batch(batches[i])
            with seeded(self.device, self.seed, "prediction", i):  # for dropout that is always on
                logits = self.model(x)
            results[i] = F.cross_entropy(logits, y, reduction="none"), logits.argmax(1)
        columns = zip(*ranks.gather(results))
        losses, predicted = (torch.cat(column).cpu() for column in columns)
        return finite(losses), predicted


def accuracy_columns(answers, tests):
    """Columns of metrics.csv, from confusions: of the clients [M, C, C], and by test set [C, C]."""
    row = {}
    if len(answers):
        row |= {"accuracies": accuracy(answers), "id_accuracy": accuracy(answers.sum(0))}
    for name, of_test in tests.items():
        row[f"{name}_accuracy"] = accuracy(of_test)
    row["confusion"] = tests["ood"] if "ood" in tests else answers.sum(0)
    return row


def unseen_columns(answers, id_accuracy):
    """Columns of metrics.csv on clients that never train, from their confusions [N - M, C, C].

    unseen_accuracies   on each client's held-out samples [N - M]
    unseen_accuracy     on all these samples together, so a client counts by its samples, as in ID
    unseen_worst        mean over the tenth of clients that is served worst (rounded up), of those
                        with at least ENOUGH held-out samples; each counts the same
    participation_gap   id_accuracy - unseen_accuracy (Yuan et al., ICLR 2022)
    """
    accuracies, unseen = accuracy(answers), accuracy(answers.sum(0))
    row = {"unseen_accuracies": accuracies, "unseen_accuracy": unseen}
    many = accuracies[answers.sum((1, 2)) >= ENOUGH].sort().values
    if len(many):
        row["unseen_worst"] = many[: -(-len(many) // 10)].mean()
    return row | {"participation_gap": id_accuracy - unseen}


def confusion(labels, predicted, classes):
    """How many samples of class i are called j: int64 [classes, classes]."""
    cells = torch.bincount(labels * classes + predicted, minlength=classes**2)
    return cells.view(classes, classes)


def accuracy(confusion):
    """The share of right answers, from the counts that confusion() returns [..., C, C]."""
    return confusion.diagonal(dim1=-2, dim2=-1).sum(-1) / confusion.sum((-2, -1))


def finite(results):
    """The same results. Raises RunError if one is not finite."""
    if not results.isfinite().all():
        raise RunError(f"a result is not finite: {ADVICE}")
    return results
