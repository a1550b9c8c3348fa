"""Results to and from `outputs/`: arrays first, result.json last. What says "done" is result.json itself.

outputs/<job>/<choices>-<8 hex>/   result.json  predictions.csv  arrays.npz
    status.json while it runs or when it failed; roots.local.json: paths of this machine, not to be passed on
"""

from __future__ import annotations

import csv
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probing.files import sweep, whole, write_json
from probing.types import digest

if TYPE_CHECKING:
    import numpy as np
    import pandas


@dataclass(frozen=True)
class Run:
    """A run folder. Its name ends in a digest of all that its numbers depend on, so a run finds its own folder."""

    folder: Path
    identity: str

    @classmethod
    def of(cls, outputs: str, job: str, choices: Sequence[str], identity: Mapping[str, Any]) -> Run:
        mark = digest(identity)
        return cls(Path(outputs) / job / f"{'-'.join(map(str, choices))}-{mark[:8]}", mark)

    def finished(self) -> dict[str, Any] | None:
        """The stored result, if this very run has one."""
        path = self.folder / "result.json"
        if not path.exists():
            return None
        result = json.loads(path.read_text())
        if result["identity"] != self.identity:
            raise ValueError(f"{self.folder} holds another run with the same first eight hex digits. Move it away")
        return result

    def begin(self, roots: Mapping[str, str]) -> None:
        """Say that this process is at it, for job=status, and which paths of this machine the names of roots stand
        for. Nothing depends on either."""
        sweep(self.folder)
        write_json(self.folder / "roots.local.json", roots)
        where = {"host": socket.gethostname(), "pid": os.getpid(), "slurm": os.environ.get("SLURM_JOB_ID"), "time": time.time()}
        write_json(self.folder / "status.json", {"state": "running", **where})

    def fail(self, reason: str) -> None:
        write_json(self.folder / "status.json", {"state": "failed", "reason": reason, "time": time.time()})

    def save(
        self, result: Mapping[str, Any], arrays: Mapping[str, np.ndarray], tables: Mapping[str, Iterable[Sequence[Any]]]
    ) -> None:
        """Arrays and tables (name -> rows, the header first), then result.json."""
        if arrays:
            import numpy as np

            with whole(self.folder / "arrays.npz") as temporary:
                np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]
        for name, rows in tables.items():
            with whole(self.folder / f"{name}.csv") as temporary, open(temporary, "w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(rows)
        write_json(self.folder / "result.json", {**result, "identity": self.identity})
        (self.folder / "status.json").unlink(missing_ok=True)


def status(outputs: str) -> list[dict[str, Any]]:
    """One row per run folder: job, run, state (done, running, interrupted, failed) and the reason or finding."""
    rows = []
    for folder in sorted(p for p in Path(outputs).glob("*/*") if (p / "result.json").exists() or (p / "status.json").exists()):
        row = {"job": folder.parent.name, "run": folder.name}
        if (folder / "result.json").exists():
            result = json.loads((folder / "result.json").read_text())
            rows.append({**row, "state": "done", "says": result.get("summary", "")})
            continue
        found = json.loads((folder / "status.json").read_text())
        state = found["state"]
        if state == "running" and found["host"] == socket.gethostname() and not _alive(found["pid"]):
            state = "interrupted"
        says = found.get("reason") or f"pid {found['pid']} on {found['host']}" + (
            f", Slurm job {found['slurm']}" if found.get("slurm") else ""
        )
        rows.append({**row, "state": state, "says": says})
    return rows


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def results(outputs: str | Path) -> pandas.DataFrame:
    """One tidy row per estimate of every finished run under `outputs`."""
    import pandas

    rows = [r for path in sorted(Path(outputs).glob("*/*/result.json")) for r in json.loads(path.read_text()).get("rows", [])]
    return pandas.DataFrame(rows)


def write_results(outputs: str) -> Path | None:
    """results.csv in `outputs`, or nothing if no run is finished."""
    table = results(outputs)
    path = Path(outputs) / "results.csv"
    if table.empty:
        return None
    with whole(path) as temporary:
        table.to_csv(temporary, index=False)
    return path
