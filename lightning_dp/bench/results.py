"""What the figures of a benchmark say: ratios round by round, and the limit."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_dp.bench.measure import Anatomy, Series
from lightning_dp.insight.cost_model import ideal_finish, ring_all_reduce_bytes, transport_share

MIB = 1024 * 1024
RESULTS_FILE = "results.json"


@dataclass(frozen=True)
class Quartiles:
    """Lower quartile, median and upper quartile."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Of some numbers."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        return (self.high - self.low) / self.median


@dataclass(frozen=True)
class Row:
    """One contender.

    Attributes:
        name: Its name.
        step: Seconds of a step.
        ratio: A step over the baseline's step of the same round.
        ratio_to_tuned: The same over the best-tuned stock contender.
        exposed: Seconds from the last gradient of all ranks to the end of backward, median.
        predicted_exposed: What its plan was predicted to leave exposed; ``None`` without a prediction.
        sent: Bytes that a rank's interface sent per step, median; ``None`` if not counted.
        sent_over_formula: ``sent`` over ``2 (n - 1) / n`` times the bytes of gradient.
        messages: Collectives per step.
        held: Bytes of gradients and buckets between steps.
        peak: The most bytes in a step beyond weights and optimizer state, activations included.
    """

    name: str
    step: Quartiles
    ratio: Quartiles
    ratio_to_tuned: Quartiles
    exposed: float
    predicted_exposed: float | None
    sent: float | None
    sent_over_formula: float | None
    messages: int
    held: int
    peak: int


@dataclass(frozen=True)
class Limit:
    """What a step must take: forward, the finish of an ideal reduction, optimizer.

    Attributes:
        ideal: Seconds, if the transport took nothing from compute.
        honest: Seconds, with the measured share of compute that the transport takes while it is busy. The same on
            devices where it takes none.
        share: That share.
        forward: Seconds of forward.
        backward: Seconds of backward.
        optimizer: Seconds of the optimizer.
        transfer: Seconds that the all-reduce of all gradients takes by itself.
        gradient_bytes: Bytes of gradient.
        bytes_per_second: Speed at which a rank sends meanwhile.
    """

    ideal: float
    honest: float
    share: float
    forward: float
    backward: float
    optimizer: float
    transfer: float
    gradient_bytes: int
    bytes_per_second: float


@dataclass(frozen=True)
class Results:
    """A whole benchmark.

    Attributes:
        rows: The contenders.
        limit: What no contender can beat.
        baseline: Name of the row that ratios refer to.
        tuned: Name of the best-tuned stock row.
        machine: On what it ran.
        config: With which settings.
    """

    rows: tuple[Row, ...]
    limit: Limit
    baseline: str
    tuned: str
    machine: dict[str, Any]
    config: dict[str, Any]

    @property
    def noise(self) -> float:
        """By how much a contender's steps differ, as the distance of their quartiles over their median; median."""
        return statistics.median(row.step.spread for row in self.rows)


def save_results(results: Results, folder: Path) -> None:
    """Writes ``results.json`` into a folder that is made if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS_FILE).write_text(json.dumps(asdict(results), indent=2) + "\n", encoding="utf-8")


def load_results(folder: Path) -> Results:
    """Reads ``results.json``."""
    data = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
    quartiles = ("step", "ratio", "ratio_to_tuned")
    rows = [{**row, **{name: Quartiles(**row[name]) for name in quartiles}} for row in data["rows"]]
    return Results(**{**data, "rows": tuple(Row(**row) for row in rows), "limit": Limit(**data["limit"])})


def limit_of(anatomy: Anatomy, world_size: int) -> Limit:
    """The limit that follows from what a step consists of."""
    gradient_bytes = sum(anatomy.nbytes)
    seconds_per_byte = anatomy.transfer / gradient_bytes if gradient_bytes else 0.0
    share = statistics.median(
        transport_share(plain, beside, anatomy.transfer, end) for plain, beside, end in anatomy.beside
    )

    def step(share: float) -> float:
        finish = ideal_finish(anatomy.ready, anatomy.nbytes, anatomy.backward, seconds_per_byte, share)
        return anatomy.forward + finish + anatomy.optimizer

    return Limit(
        ideal=step(0.0),
        honest=step(share),
        share=share,
        forward=anatomy.forward,
        backward=anatomy.backward,
        optimizer=anatomy.optimizer,
        transfer=anatomy.transfer,
        gradient_bytes=gradient_bytes,
        bytes_per_second=ring_all_reduce_bytes(gradient_bytes, world_size) / anatomy.transfer,
    )


def results_of(
    series: Mapping[str, Series],
    anatomy: Anatomy,
    world_size: int,
    baseline: str,
    tuned: Sequence[str],
    machine: dict[str, Any],
    config: dict[str, Any],
) -> Results:
    """Draws up the results.

    Args:
        series: Figures of each contender.
        anatomy: What a step consists of.
        world_size: Number of ranks.
        baseline: The contender that ratios refer to.
        tuned: Candidates for the best-tuned stock contender; the fastest by median is taken.
        machine: Noted as it is.
        config: Noted as it is.
    """
    candidates = [name for name in (*tuned, baseline) if name in series]
    best = min(candidates, key=lambda name: statistics.median(series[name].steps))
    limit = limit_of(anatomy, world_size)
    formula = ring_all_reduce_bytes(limit.gradient_bytes, world_size)
    rows = []
    for name, figures in series.items():
        sent = statistics.median(figures.sent) if figures.sent is not None else None
        rows.append(
            Row(
                name,
                Quartiles.of(figures.steps),
                _ratio(figures.steps, series[baseline].steps),
                _ratio(figures.steps, series[best].steps),
                statistics.median(figures.exposed),
                figures.predicted_exposed,
                sent,
                sent / formula if sent is not None and formula else None,
                figures.footprint.messages,
                figures.footprint.held,
                figures.footprint.peak,
            )
        )
    return Results(tuple(rows), limit, baseline, best, machine, config)


def _ratio(steps: Sequence[float], others: Sequence[float]) -> Quartiles:
    return Quartiles.of([mine / theirs for mine, theirs in zip(steps, others, strict=True)])


def table_of(results: Results) -> Table:
    """The rows, and below them the limit, as a table to print."""
    limit = results.limit
    table = Table(
        title=f"{results.machine['world_size']} ranks, {limit.gradient_bytes / MIB:.1f} MiB of gradients",
        caption=(
            f"limit: forward {_ms(limit.forward)} + ideal reduction + optimizer {_ms(limit.optimizer)}; backward"
            f" {_ms(limit.backward)}, all-reduce alone {_ms(limit.transfer)} ms"
            f" ({limit.bytes_per_second * 8 / 1e9:.2f} Gbit/s a rank), which takes {limit.share:.0%} of compute"
            f" meanwhile\nratios to '{results.baseline}' of the same round: median (quartiles);"
            f" best-tuned stock: '{results.tuned}'\nsteps of the same contender differ by {results.noise:.0%} between"
            " their quartiles (median over contenders): noise, if the work is always the same"
        ),
    )
    columns = ("contender", "step ms", "x stock", "x tuned", "exposed ms", "predicted")
    for column in (*columns, "sent MiB", "x formula", "messages", "held MiB", "peak MiB"):
        table.add_column(column, justify="left" if column == "contender" else "right", no_wrap=True)
    for row in results.rows:
        table.add_row(
            row.name,
            _ms(row.step.median),
            f"{row.ratio.median:.3f} ({row.ratio.low:.3f}-{row.ratio.high:.3f})",
            f"{row.ratio_to_tuned.median:.3f}",
            _ms(row.exposed),
            "-" if row.predicted_exposed is None else _ms(row.predicted_exposed),
            "-" if row.sent is None else f"{row.sent / MIB:.2f}",
            "-" if row.sent_over_formula is None else f"{row.sent_over_formula:.4f}",
            str(row.messages),
            f"{row.held / MIB:.1f}",
            f"{row.peak / MIB:.1f}",
        )
    base = next(row for row in results.rows if row.name == results.baseline).step.median
    best = next(row for row in results.rows if row.name == results.tuned).step.median
    for name, seconds in (("limit", limit.ideal), ("limit, with transport's cycles", limit.honest)):
        table.add_row(name, _ms(seconds), f"{seconds / base:.3f}", f"{seconds / best:.3f}", *[""] * 7, style="bold")
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
