"""Measures a model after a round: client by client, also those that never train, and on test sets.

docs/metrics.md explains each column.
"""

import torch

from common.splits import RARE

ENOUGH = 10  # with fewer held-out samples, an accuracy says little about a client


def evaluate(trainer, theta, t, selected, losses):
    """What is to be seen after round t, by column of metrics.csv.

    theta     the server's weights [P]
    selected  the clients that have trained, int64 [K], with their mean losses [K]

    A round that is not due has only their mean loss and the costs.
    """
    clients = trainer.clients
    m = clients.participating
    row = {"selected": selected, "train_loss": losses.mean(), **trainer.cost()}
    if not trainer.is_due(t):
        return row
    found = confusions(trainer, theta, [*clients.test[:m], *clients.tests.values()])
    of_clients = found[:m]
    of_tests = dict(zip(clients.tests, found[m:]))
    if any(map(len, clients.test)):  # not with --held-out 0
        of_silent = confusions(trainer, theta, clients.test[m:])
        row |= by_client(of_clients, of_silent)
        row["id_selected"] = accuracy(of_clients[selected].sum(0))
    row |= by_test(of_tests, of_clients)
    row["selected_size"] = clients.sizes[selected].mean()
    if "rare" in clients.tests:
        counts = clients.label_counts[selected]
        holds_rare = counts[:, -RARE:].sum(1) > counts.sum(1) / 2  # a few may be wrong labels
        row["rare_selected"] = holds_rare.float().mean()
    return row


def evaluate_silos(trainer, theta, t, losses, may_use, args, is_due=False):
    """The same for UEFL, whose clients all train, and may each use other codewords.

    may_use  the codewords that each may use, bool [K, V]
    args     the flags; a silo is turned if its angle is not the first of --rotate
    is_due   true if a round in which no evaluation is due is evaluated, too

    Whoever never trains has no codewords of its own, and may use everybody's.
    """
    clients, m = trainer.clients, len(may_use)
    row = {"selected": clients.ids, "train_loss": losses.mean()}
    if not is_due and not trainer.is_due(t):
        return row | trainer.cost()
    codewords = may_use.sum(1)
    everybody = may_use.any(0)
    ids = torch.arange(len(clients.test))
    own = {"may_use": [*may_use] + [everybody] * (len(ids) - m)}
    found, e, perplexities, code_losses = trainer.map(of_words, theta, ids, clients.test, t, own)
    trainer.count(clients.ids, numbers=1)  # e_k goes up
    of_clients, e = found[:m], e[:m]
    of_tests = {}
    for name, samples in clients.tests.items():
        pieces = samples.split(1000)  # for several processes
        numbers = torch.arange(len(pieces))
        of_pieces, *_ = trainer.map(of_words, theta, numbers, pieces, t, may_use=everybody)
        of_tests[name] = of_pieces.sum(0)
    row |= {"uncertainties": e, "mE": e.mean(), "codewords": codewords}
    row |= by_client(of_clients, found[m:])
    row |= by_test(of_tests, of_clients)
    row["mA"] = row["accuracies"].mean()
    if args.codebook_size:
        row |= {"mP": perplexities[:m].mean(), "code_loss": code_losses[:m].mean()}
    if args.rotate:
        first = f"{args.rotate[0]:g}"
        turned = [k for k in range(m) if clients.groups[k] != first]
        if turned:
            row["turned_accuracy"] = row["accuracies"][turned].mean()
            row["turned_extended"] = (codewords[turned] > args.codebook_size).float().mean()
    return row | trainer.cost()


@torch.no_grad()
def of_words(model, batches, may_use):
    """Of one client in UEFL: its confusion [C, C], uncertainty e_k, perplexity, and mean L_code.

    Its answers are those of the mean of all passes with dropout, while the other methods' files
    switch dropout off. The paper does not define perplexity: as in the authors' code it is
    exp(entropy) of how often a codeword is used, but of all samples, where theirs is a mean over
    batches of 100 images.
    """
    found = []
    for x, y in batches:
        c, code_loss, indices = model.codebook(model.encode(x), may_use)
        found.append((y, model.mc_dropout(c).mean(0), code_loss.expand(len(y)), indices.flatten()))
    labels, p, code_losses, indices = map(torch.cat, zip(*found))
    usage = indices.bincount().float()
    perplexity = torch.special.entr(usage / usage.sum()).sum().exp()
    e = torch.special.entr(p).sum(1).mean()
    return confusion(labels, p.argmax(1), p.shape[1]), e, perplexity, code_losses.mean()


def confusions(trainer, theta, parts):
    """The confusion of each of these parts of the samples, int64 positions: [parts, C, C]."""
    found = torch.zeros(len(parts), trainer.classes, trainer.classes, dtype=torch.long)
    if parts:
        _, predicted = trainer.predict(theta, torch.cat(parts))
        guesses = predicted.split([len(part) for part in parts])
        for cells, part, guess in zip(found, parts, guesses):
            cells += confusion(trainer.labels[part], guess, trainer.classes)
    return found


def accuracy(cells):
    """The share of right answers in a confusion [C, C], or in each of several [n, C, C]: [n]."""
    return cells.diagonal(dim1=-2, dim2=-1).sum(-1) / cells.sum((-2, -1))


def by_client(of_clients, of_silent):
    """Columns of metrics.csv, from the confusions of the clients' held-out samples.

    of_clients  of those that participate [M, C, C]
    of_silent   of those that never train [N - M, C, C]

    accuracies          of each participating client [M]
    id_accuracy         of their samples together, so a client counts by its samples
    unseen_accuracies   of each client that never trains [N - M]
    unseen_accuracy     of their samples together
    unseen_worst        mean over the tenth of these clients that is served worst (rounded up), of
                        those with ENOUGH held-out samples; here each counts the same
    participation_gap   id_accuracy - unseen_accuracy (Yuan et al., ICLR 2022)
    """
    row = {"accuracies": accuracy(of_clients), "id_accuracy": accuracy(of_clients.sum(0))}
    if len(of_silent):
        row["unseen_accuracies"] = accuracy(of_silent)
        row["unseen_accuracy"] = accuracy(of_silent.sum(0))
        row["participation_gap"] = row["id_accuracy"] - row["unseen_accuracy"]
        enough = of_silent.sum((1, 2)) >= ENOUGH
        ranked = row["unseen_accuracies"][enough].sort().values
        if len(ranked):
            row["unseen_worst"] = ranked[: (len(ranked) + 9) // 10].mean()
    return row


def by_test(of_tests, of_clients):
    """Columns of metrics.csv, from the confusions of test sets, name -> [C, C], and of clients."""
    row = {f"{name}_accuracy": accuracy(cells) for name, cells in of_tests.items()}
    row["confusion"] = of_tests.get("ood", of_clients.sum(0))
    return row


def confusion(labels, predicted, classes):
    """How many samples of class i are called j: int64 [classes, classes]."""
    cells = torch.bincount(labels * classes + predicted, minlength=classes**2)
    return cells.view(classes, classes)
