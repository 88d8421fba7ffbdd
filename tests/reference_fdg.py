"""Decoupled training with delayed gradients, written a second time and without lpnet: plain torch, one process.

Every module keeps a list of all weights it ever had. A tick is two phases for module k = 1 .. K (in the order asked
for): take batch t - k + 1 forward, take batch t - 2K + k + 1 back. A backward runs the module again, on a copy with the
weights that `backward` names, so that no autograd graph lives longer than a line.
"""

from __future__ import annotations

import copy

import torch


class Reference:
    def __init__(self, network, cuts, loss, *, lr, momentum=0.0, decay=0.0, beta=1.0, backward="stash",
                 order="backward_first", schedule="fdg", rates=None, clip=None, accumulate=1, prediction=None,
                 spike=False, nesterov=False, anneal=0):  # fmt: skip
        bounds = [0, *cuts, len(network)]
        self.parts = [network[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]
        self.count, self.loss = len(self.parts), loss
        self.lr, self.momentum, self.decay, self.beta, self.rates = lr, momentum, decay, beta, rates
        self.backward, self.order, self.schedule, self.clip, self.accumulate = (
            backward,
            order,
            schedule,
            clip,
            accumulate,
        )
        self.prediction, self.spike, self.nesterov, self.anneal = prediction, spike, nesterov, anneal
        self.velocity = [[None for _ in part.parameters()] for part in self.parts]
        self.history = [
            [self.weights(k)] for k in range(self.count)
        ]  # of every module: weights after 0, 1, ... updates
        self.inputs, self.used, self.seen = {}, {}, {}  # by (module, batch): input, weights, updates at the forward
        self.waiting = [[] for _ in self.parts]
        self.outputs, self.slopes, self.losses, self.squares = {}, {}, {}, {}
        self.gradients = {}  # by (module, batch), as they came from autograd
        self.stale = {}

    def weights(self, k):
        return [p.detach().clone() for p in self.parts[k].parameters()]

    def delay(self, k):  # k counts from 0
        behind = self.count - 1 - k
        return {"fdg": 2 * behind, "ddg": behind, "fr": behind, "bp": 0}[self.schedule]

    def train(self, data):
        total = len(data)
        lag = 1 if self.schedule == "fdg" else 0
        tick = 0
        while (0, total - 1) not in self.gradients:
            for k in range(self.count):
                forward, back = tick - lag * k, tick - lag * k - self.delay(k)
                work = [(self.go_forward, forward), (self.go_back, back)]
                if self.order == "backward_first" and self.delay(k) > 0:
                    work.reverse()
                for do, batch in work:
                    if 0 <= batch < total:
                        do(k, batch, data)
            tick += 1
        return [self.losses[b] for b in range(total)]

    def go_forward(self, k, batch, data):
        x, y = data[batch]
        x = x if k == 0 else self.outputs.pop((k - 1, batch))
        updates = len(self.history[k]) - 1
        self.inputs[k, batch], self.seen[k, batch] = x.clone(), updates
        used = self.ahead(k, batch) if self.prediction else self.weights(k)
        self.used[k, batch] = used
        with torch.no_grad():
            out = self.on_copy(k, used, keep_statistics=True)(x.clone())
        self.outputs[k, batch] = out
        if k == self.count - 1:
            self.losses[batch] = float(self.loss(out, y))

    def on_copy(self, k, weights, keep_statistics=False):
        """A copy of the module with other weights; its running statistics are its own, or the module's."""
        part = copy.deepcopy(self.parts[k])
        for p, value in zip(part.parameters(), weights, strict=True):
            p.data = value.clone()
        if keep_statistics:
            for own, twin in zip(self.parts[k].modules(), part.modules(), strict=True):
                twin._buffers = own._buffers
        return part

    def go_back(self, k, batch, data):
        x = self.inputs.pop((k, batch)).requires_grad_(k > 0)
        weights = self.used.pop((k, batch)) if self.backward == "stash" else self.weights(k)
        part = self.on_copy(k, weights)
        out = part(x.clone())
        if k == self.count - 1:
            self.loss(out, data[batch][1]).backward()
        else:
            out.backward(self.slopes.pop((k, batch)) * self.beta)
        if k > 0:
            self.slopes[k - 1, batch] = x.grad
        gradient = [p.grad for p in part.parameters()]
        self.gradients[k, batch] = [g.clone() for g in gradient]
        self.waiting[k].append(gradient)
        last = batch == len(data) - 1
        if len(self.waiting[k]) == self.accumulate or last:
            mean = [sum(rows[1:], rows[0]) / len(rows) for rows in zip(*self.waiting[k], strict=True)]
            self.waiting[k] = []
            if self.clip:
                own = sum(float((g**2).sum()) for g in mean)
                self.squares[k, batch] = own + self.squares.get((k + 1, batch), 0.0)
                factor = min(1.0, self.clip / (self.squares[k, batch] ** 0.5 + 1e-6))
                mean = [g * factor for g in mean]
            self.update(k, batch, mean)

    def rate(self, k, batch):
        lr = self.lr * (self.rates(batch) if self.rates else 1.0)
        if self.anneal and batch < self.anneal:
            lr /= max(self.delay(k) / self.accumulate, 1.0) ** (1.0 - batch / self.anneal)
        return lr

    def update(self, k, batch, gradient):
        lr, m = self.rate(k, batch), self.momentum
        stale = len(self.history[k]) - 1 - self.seen[k, batch]
        self.stale[k, batch] = stale
        with torch.no_grad():
            for place, (p, g) in enumerate(zip(self.parts[k].parameters(), gradient, strict=True)):
                g = g.add(p, alpha=self.decay) if self.decay else g
                if self.nesterov:
                    g = (1 - m) * g
                v = self.velocity[k][place]
                v = g if v is None or m == 0 else (m * v).add(g)
                self.velocity[k][place] = v
                look = (stale if self.spike else 0) + (1 if self.nesterov else 0)
                if look == 0:
                    p.add_(v, alpha=-lr)  # the roundings of torch.optim.SGD
                else:
                    p -= lr * (m**look * v + (1 - m**look) / (1 - m) * g)
        self.history[k].append(self.weights(k))

    def ahead(self, k, batch):
        """Weights expected when the gradient of this batch lands."""
        landed = sum((k, b) in self.gradients for b in range(batch))
        steps = batch // self.accumulate - landed // self.accumulate
        if self.prediction == "half":
            steps = min(steps, self.count - 1 - k)
        out = []
        for p, v in zip(self.weights(k), self.velocity[k], strict=True):
            out.append(p if v is None else p - self.rate(k, landed) * steps * v)
        return out
