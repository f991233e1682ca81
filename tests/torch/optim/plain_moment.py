"""A coded moment's passes in plain torch, which are their definition: the same bits.

Sums have the order that csrc/optim/moments.h says.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

import pycomm
from pycomm.feedback import storage
from pycomm.momentum import agreement
from pycomm.momentum.moment import LIMIT, CodedMoment, SGDMoment

TINY, FLOOR = 1e-30, 0.1
EXTRA = 3 + agreement.ROWS


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Patches of 256 values, of 32 lanes, of which one half is added to the other."""
    rows, columns = x.shape
    patches = max(1, -(-columns // 256))
    lanes = F.pad(x, (0, patches * 256 - columns)).view(rows, patches, 8, 32).unbind(2)
    patch = _in_order(lanes)
    while patch.shape[2] > 1:
        half = patch.shape[2] // 2
        patch = patch[..., :half] + patch[..., half:]
    return _in_order(patch[..., 0].unbind(1))


def column_sums(x: torch.Tensor) -> torch.Tensor:
    """Two neighbouring rows, these in blocks of 64 rows, and the blocks."""
    rows, columns = x.shape
    blocks = max(1, -(-rows // 64))
    pairs = F.pad(x, (0, 0, 0, blocks * 64 - rows)).view(blocks, 32, 2, columns).sum(2)
    return _in_order(_in_order(pairs.unbind(1)).unbind(0))


def total(vector: torch.Tensor) -> torch.Tensor:
    return row_sums(vector.reshape(1, -1))[0]


def _in_order(parts: Any) -> torch.Tensor:
    sums = parts[0]
    for part in parts[1:]:
        sums = sums + part
    return sums


def root(x: torch.Tensor) -> torch.Tensor:
    """Torch does not round roots of float32 correctly on all processors."""
    return x.double().sqrt().float()


def number(value: float) -> torch.Tensor:
    """A float32 tensor, by which torch divides: by a number it would multiply."""
    return torch.tensor(value, dtype=torch.float32)


def floats(stored: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return storage.load(stored, shape.numel()).view(shape)


def signs_of(columns: int, step: int) -> torch.Tensor:
    """The random signs of a step, float32 [columns]."""
    begin = agreement.place_of_signs(step)
    return agreement.table(columns, torch.device("cpu"))[begin : begin + columns]


def shortened(momentum: float, error: float) -> float:
    """The coefficient of a coded momentum that has the horizon of an exact one."""
    error = min(0.99, error)
    found = math.floor(1024 * (momentum - error) / (1 - error)) / 1024
    return max(0.0, found) if error else momentum


def share(of_mean: float, own: float, ranks: int) -> float:
    """The squares of the mean gradient over the mean of squares, rounded."""
    if not own > 0:
        return 1.0
    return round(256 * min(1.0, max(1 / ranks, of_mean / own))) / 256


class PlainMoment:
    """What the passes keep of a matrix, and the passes.

    Args:
        parameter: the own rows of it.
        rows: of the whole matrix.
        settings: of the optimizer's group, which may change: those of AdamW, or of SGD.
        error: of the codec, in squares.
        shard, shards: which rows are the own ones.
        ranks: number of ranks that average their momenta.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        rows: int,
        settings: dict[str, Any],
        error: float,
        *,
        shard: int = 0,
        shards: int = 1,
        ranks: int = 1,
    ) -> None:
        self.x, self.m = parameter.clone(), torch.zeros_like(parameter)
        self.rows, self.columns, self.ranks = rows, parameter.shape[1], ranks
        self.settings, self.is_sgd = settings, "momentum" in settings
        self.beta2 = 0.99 if self.is_sgd else settings["betas"][1]
        self.eps = settings.get("eps", 0.0)
        self.padded, self.shard = -(-rows // shards), shard
        self.sums = [torch.zeros(rows), torch.zeros(self.columns)]
        self.heard = [torch.zeros(2, rows), torch.zeros(2, self.columns)]
        self.weight, self.error, self.mean_energy, self.own_energy = (
            number(v) for v in (0.0, error, 0.0, 0.0)
        )
        self.since = torch.zeros(rows + self.columns + EXTRA)
        self.steps, self.waiting, self.decay = 0, 0, 1.0
        self.scale: Any = None
        self.probe: Any = None

    @property
    def beta1(self) -> float:
        return self.settings["momentum"] if self.is_sgd else self.settings["betas"][0]

    @property
    def kept(self) -> float:
        """What m and o are of a mean of gradients: SGD keeps the unit of torch's buffer."""
        return 1 / (1 - self.beta1) if self.is_sgd else 1.0

    def state(self) -> list[torch.Tensor]:
        numbers = [self.weight, self.error, self.mean_energy, self.own_energy]
        return [self.x, self.m, *self.sums, torch.cat(self.heard, 1), *numbers]

    # ------------------------------------------------------------------ factors

    def _floors(self) -> list[torch.Tensor]:
        even = [mean * mean / square.clamp_min(TINY) for mean, square in self.heard]
        return [(1 - one / number(0.5)).clamp_min(1e-4) for one in even]

    def _factors(self, row: torch.Tensor, column: torch.Tensor, weight: Any, floors: Any) -> Any:
        of_columns = total(column)
        all_ = (of_columns * weight).clamp_min(TINY)
        least = root(of_columns / all_ / number(self.rows)) * FLOOR
        by_row = torch.maximum(root(row / all_), (least * root(floors[0])).clamp_min(TINY))
        least = root(of_columns / number(self.columns)) * FLOOR
        return by_row, torch.maximum(root(column), (least * root(floors[1])).clamp_min(TINY))

    def reciprocals(self) -> tuple[torch.Tensor, torch.Tensor]:
        least = number(float(self.weight) * max(self.eps, 1e-12) ** 2)
        row, column = self.sums
        by_column, by_row = column + least * self.rows, row + least * self.columns
        of_columns, square, floors = total(by_column), number(FLOOR) * number(FLOOR), self._floors()
        lowest = square * (of_columns / number(self.rows)) * floors[0]
        row = root(of_columns * self.weight / torch.maximum(lowest, by_row))
        lowest = square * (of_columns / number(self.columns)) * floors[1]
        return row, 1 / root(torch.maximum(lowest, by_column))

    # ------------------------------------------------------------------ a backward

    def rows_of(self, shard: int) -> slice:
        begin = min(self.rows, shard * self.padded)
        return slice(begin, min(self.rows, begin + self.padded))

    def d(self, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of a shard; padding has 1."""
        row, column = self.scale
        own = row[self.rows_of(shard)]
        return F.pad(own, (0, self.padded - len(own)), value=1.0)[:, None], column

    def begin(self) -> None:
        self.fresh, self.probe = torch.zeros(self.rows + self.columns + EXTRA), None
        self.scale = None
        if self.weight > 0:
            self.scale = self._factors(*self.sums, self.weight, self._floors())

    def look(self, shards: dict[int, torch.Tensor], unit: float, looks: bool) -> dict[int, Any]:
        """Add up squares of gradients; return what each shard's counts."""
        found = {}
        for shard, g in shards.items():
            rows = self.rows_of(shard)
            g = g.float()[: rows.stop - rows.start]
            if looks:
                stride = max(1, -(-self.rows // agreement.ROWS))
                signs = signs_of(self.columns, self.steps)
                for i in range(rows.start, rows.stop):
                    if i % stride == self.steps % stride:
                        products = (g[i - rows.start] * signs)[None]
                        self.fresh[i // stride - agreement.ROWS] += row_sums(products)[0] * unit
            of_rows, square = row_sums(g * g), number(unit**2)
            self.fresh[rows] += of_rows * square
            if len(g):
                self.fresh[self.rows : -EXTRA] += column_sums(g * g) * square
            found[shard] = number(1.0)
            if self.weight > 0:
                energies = float(self.mean_energy), float(self.own_energy)
                own = float(self.weight) * share(*energies, self.ranks)
                energy = total(of_rows) * square
                bound = (SGDMoment if self.is_sgd else CodedMoment).bound(self.ranks)
                most = (total(self.sums[0][rows]) * number(bound**2 / own)).clamp_min(TINY)
                found[shard] = root(most / energy) if energy > most else number(1.0)
        return found

    def provide(self, mean: torch.Tensor) -> None:
        """Take the ranks' mean sums as the scale of the first coding."""
        row, column = mean[: self.rows], mean[self.rows : -EXTRA]
        if not mean[:-EXTRA].isfinite().all():
            row, column = torch.full_like(row, self.columns), torch.full_like(column, self.rows)
        self.scale = self._factors(row, column, 1.0, [number(1.0), number(1.0)])

    def encode(
        self,
        shards: dict[int, torch.Tensor],
        counts: dict[int, Any],
        went: dict[int, torch.Tensor],
        residuals: dict[int, torch.Tensor],
        *,
        unit: float,
        looks: bool,
        divides: bool,
    ) -> None:
        """Replace gradients [padded, columns] by p = (b o / kept + (1 - b) unit g) / d.

        Args:
            counts: what `look` has found.
            went: o of the shards, as it is stored, of all rows or the real ones.
            residuals: as they are stored.
        """
        beta = shortened(self.beta1, float(self.error))
        for shard, values in shards.items():
            real = self.rows_of(shard).stop - self.rows_of(shard).start
            by = number(beta) * (1 / number(self.kept))
            p = values.float() * number((1 - beta) * unit)
            row, column = (1 / one for one in self.d(shard)) if divides else (1.0, 1.0)
            m = torch.zeros_like(p)
            if beta > 0:
                sent = storage.load(went[shard], p.numel()).view(-1)[: real * self.columns]
                m[:real] = sent.view(real, self.columns)
                p[:real] += m[:real] * by
            p = p * row * column
            if counts[shard] < 1:
                p = p * counts[shard]
                p[:real] += (m * ((1 - counts[shard]) * by) * row * column)[:real]
            values.copy_(p)
            if looks:
                e = floats(residuals[shard], p.shape)
                for k, errors in enumerate((e, p + e)):
                    self.fresh[self.rows + self.columns + k] += total(row_sums(errors * errors))

    def sent(
        self, x: torch.Tensor, before: Any, after: Any, shard: int, *, divides: bool
    ) -> torch.Tensor:
        """What was sent of a shard's coded values: (x + before - after) d kept."""
        row, column = self.d(shard) if divides else (number(1.0), number(1.0))
        row = row * number(self.kept)
        return (x.float() + floats(before, x.shape) - floats(after, x.shape)) * row * column

    def land(self, values: torch.Tensor, unit: float, divides: bool) -> None:
        """Make the mean of the own shard a momentum, and look at its first values."""
        if divides or unit != 1:
            row, column = self.d(self.shard) if divides else (number(1.0), number(1.0))
            values.copy_(values.float() * (row * number(unit)) * column)
        real = (self.rows_of(self.shard).stop - self.rows_of(self.shard).start) * self.columns
        first = values.reshape(-1)[: min(2048, real)].float()
        sizes = first.abs()
        self.probe = None
        if real:
            places = [int(sizes.argmax()), int(sizes.where(sizes > 0, math.inf).argmin())]
            found = [float(first[i] / number(unit)) for i in places]
            known = found[0] != 0 and places[0] != places[1]
            self.probe = (places, found) if known else None

    # ------------------------------------------------------------------ a step

    def local_sums(self) -> torch.Tensor:
        sums = self.fresh.clone()
        if self.waiting:
            behind = -agreement.ROWS - 1
            both = self.since[:behind] + self.fresh[:behind]
            sums[:behind] = both / number(self.waiting + 1)
        projections = sums[-agreement.ROWS :]
        sums[-agreement.ROWS - 1] = total(projections * projections)
        return sums

    def commit(self, sums: torch.Tensor | None) -> None:
        """Take the ranks' total of `local_sums`; None: it did not travel."""
        self.decay *= self.beta2
        mean = None if sums is None else sums / number(self.ranks)
        if mean is not None:
            projections = mean[-agreement.ROWS :]
            of_mean = total(projections * projections)
        if mean is None or sums is None or not (sums.isfinite().all() and of_mean.isfinite()):
            if self.fresh.isfinite().all():
                self.since += self.fresh
            self.waiting += 1
            return
        if not total(mean[: self.rows]) > 0:
            self.since.zero_()
            self.waiting, self.decay = 0, 1.0
            return
        decay, more = self.decay, self.waiting
        left, coded, own = (float(mean[i - EXTRA]) for i in range(3))

        def decayed(before: torch.Tensor, by: float, now: float) -> torch.Tensor:
            return number(by * float(before) + (1 - by) * now)

        self.mean_energy = decayed(self.mean_energy, decay, float(of_mean))
        self.own_energy = decayed(self.own_energy, decay, own)
        self.weight = decayed(self.weight, decay, 1.0)
        if left > 0 and coded > 0:
            self.error = decayed(self.error, 0.75, min(1.0, left / coded))
        energies = float(self.mean_energy), float(self.own_energy)
        weight = number((1 - decay) * share(*energies, self.ranks))
        fresh = mean[: self.rows], mean[self.rows : -EXTRA]
        slow = math.prod([0.99] * (more + 1))
        for into, heard, one in zip(self.sums, self.heard, fresh, strict=True):
            into.copy_(into * number(decay) + one * weight)
            part = one / (total(one) / number(len(one))).clamp_min(TINY)
            known = total(heard[0]) / number(len(one))
            away = part - heard[0] / known if known > TINY else torch.zeros_like(part)
            kept, rest = number(slow), number(1 - slow)
            heard[1] = heard[1] * kept + (part * part + away * away * number(more)) * rest
            heard[0] = heard[0] * kept + part * rest
        self.since.zero_()
        self.waiting, self.decay = 0, 1.0

    def move(self, gradient: torch.Tensor, lr: float, weight_decay: float) -> None:
        """Move the parameter by its gradient, which is the momentum."""
        self.steps += 1
        now, by_clip = gradient.float(), number(1.0)
        if self.probe is not None and (self.weight > 0 or self.is_sgd):
            at, values = self.probe
            by, other = (now.reshape(-1)[i] / number(v) for i, v in zip(at, values, strict=True))
            tolerance = 2.0**-16 if gradient.dtype == torch.float32 else 2.0**-6
            if 1e-12 < by < 1e12 and (by - 1).abs() > tolerance:
                by_clip = 1 / by if (other - by).abs() <= number(tolerance) * by else by_clip
        self.m.copy_(now * (number(self.kept) * by_clip))
        if self.is_sgd:  # of which clipping counts
            keep = number(max(0.0, 1 - lr * self.kept * weight_decay))
            self.x.copy_(self.x.float() * keep - now * number(lr * self.kept))
            return
        if not self.weight > 0:
            return
        now, correction = now * by_clip, 1 - self.beta1**self.steps
        row, column = self.reciprocals()
        moved = now * row[self.rows_of(self.shard), None] * column
        if self.waiting:
            moved = moved.clamp(-LIMIT * correction, LIMIT * correction)
        keep = number(1 - lr * weight_decay)
        self.x.copy_(self.x.float() * keep - moved * number(lr / correction))


class PlainRanks:
    """A coded optimizer of one matrix on all ranks, whose rows may be dealt to as many shards.

    Args:
        start: the matrix.
        ranks: number of ranks.
        codec: text of the codec of the momentum.
        settings: of the optimizer's group, which may change.
        shards: number of shards; 1: each rank has the whole matrix.
    """

    def __init__(
        self, start: torch.Tensor, ranks: int, codec: str, settings: dict[str, Any], shards: int = 1
    ) -> None:
        self.codec, self.settings, self.shards = pycomm.codec(codec), settings, shards
        error = pycomm.policy.quality.nominal_error(self.codec) ** 2
        rows, padded = start.shape[0], -(-start.shape[0] // shards)
        self.moments = [
            PlainMoment(
                *(start[shard * padded : (shard + 1) * padded], rows, settings, error),
                **{"shard": shard, "shards": shards, "ranks": ranks},
            )
            for shard in (rank % shards for rank in range(ranks))
        ]
        zeros = torch.zeros(padded * start.shape[1])
        self.kept = [[(zeros, zeros)] * shards for _ in range(ranks)]  # e and o
        self.m = torch.zeros_like(start)

    @property
    def x(self) -> torch.Tensor:
        return torch.cat([moment.x for moment in self.moments[: self.shards]])

    def step(self, gs: list[torch.Tensor]) -> None:
        ranks, given, counts = len(gs), [], []
        for moment, g in zip(self.moments, gs, strict=True):
            moment.begin()
            whole = F.pad(g, (0, 0, 0, self.shards * moment.padded - len(g)))
            given.append(dict(enumerate(whole.split(moment.padded))))
            counts.append(moment.look(given[-1], 1.0, True))
        mean = sum(moment.local_sums() for moment in self.moments) / ranks
        means: list[Any] = [0.0] * self.shards
        for rank, moment in enumerate(self.moments):
            if moment.scale is None and not moment.is_sgd:
                moment.provide(mean)
            errors, went = (dict(enumerate(each)) for each in zip(*self.kept[rank], strict=True))
            how = {"unit": 1.0, "looks": True, "divides": not moment.is_sgd}
            moment.encode(given[rank], counts[rank], went, errors, **how)
            for shard, values in given[rank].items():
                p = values.reshape(-1) + errors[shard]
                q = self.codec.decode(self.codec.encode(p), p.numel())
                sent = moment.sent(values, errors[shard], p - q, shard, divides=how["divides"])
                self.kept[rank][shard] = p - q, sent.reshape(-1)
                means[shard] = means[shard] + q.view_as(values) / ranks
        sums = sum(moment.local_sums() for moment in self.moments)
        landed = []
        for moment in self.moments:
            momentum = means[moment.shard].clone()
            moment.land(momentum, 1.0, not moment.is_sgd)
            landed.append(momentum[: len(moment.x)])
            moment.commit(sums)
            moment.move(landed[-1], self.settings["lr"], self.settings["weight_decay"])
        self.m = torch.cat(landed[: self.shards])
