"""``lightning-dp-bench``: ways to take a data-parallel step, measured side by side, with the limit beside them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig
from rich.console import Console

from lightning_dp.bench.launch import BenchError, Place, run_ranks
from lightning_dp.bench.rank import run_rank
from lightning_dp.bench.results import Results, load_results, save_results, table_of
from lightning_dp.cli.one_line_errors import one_line_errors
from lightning_dp.config import config_directory, save_config

WIDTH = 180  # of the table where output is not a terminal


def bench(cfg: DictConfig) -> Results | None:
    """Runs a benchmark: as one rank of a launch that there is, else on ranks that it starts.

    Args:
        cfg: Composed from ``conf/bench/bench.yaml``.

    Returns:
        The results; ``None`` on ranks other than 0.
    """
    folder = Path(cfg.output_dir)
    place = Place.from_environment(os.environ)
    if place is None:
        run_ranks(save_config(cfg, folder), cfg.ranks, cfg.network.hosts, cfg.network.rate, cfg.timeout)
        results = load_results(folder)
    else:
        results = run_rank(cfg, place)
        if place.rank != 0:
            return None
        save_results(results, folder)
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table_of(results))
    console.print(f"figures: {folder / 'results.json'}", soft_wrap=True)
    return results


@hydra.main(version_base="1.3", config_path=str(config_directory() / "bench"), config_name="bench")
def _program(cfg: DictConfig) -> None:
    with one_line_errors():
        try:
            bench(cfg)
        except BenchError as error:
            print(error, file=sys.stderr)
            sys.exit(1)


def main() -> None:
    """Entry point of the command."""
    # A class of the user's own is looked for where the command is run, as `python -m` does.
    sys.path.insert(0, os.getcwd())
    # Ranks and hosts that were made are removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with one_line_errors():
        _program()


if __name__ == "__main__":
    main()
