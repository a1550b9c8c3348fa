"""Hydra's main: composes the config, runs the job, prints the closing table of a sweep, sets the exit code.

python probe.py --help          python -m probing --help          probe --help
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
import uuid
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from probing import jobs, records
from probing.files import write_json
from probing.jobs.configure import CONF, near
from probing.jobs.show import table

SWEEP = "PROBING_SWEEP"  # environment: the folder that the jobs of this launch report to
log = logging.getLogger("probing")


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def _job(cfg: DictConfig) -> None:
    """One job of a launch. What went wrong is written down, not raised: the other jobs of a sweep go on."""
    _speak()
    found, choices = HydraConfig.get(), HydraConfig.get().runtime.choices
    card = ["task=", "images="] if choices.get("data") not in (None, "null") else []  # a data card chooses these
    typed = [*found.overrides.task, *card]
    defaults = [k for k in ("encoder", "task", "images", "protocol") if not any(t.startswith(f"{k}=") for t in typed)]
    shown = {
        "job": cfg.job.name,
        "encoder": choices.get("encoder"),
        "task": choices.get("task"),
        "images": choices.get("images"),
        "folder": "",
        "seconds": 0.0,
    }
    stopped = False
    try:
        searched = [o for o in found.overrides.hydra if o.startswith("hydra.searchpath=")]
        launch = jobs.Launch((*searched, *found.overrides.task), tuple(defaults), _config_dir(found))
        outcome = {**shown, **jobs.run(cfg, launch)}
    except KeyboardInterrupt:
        stopped = True
        outcome = {
            **shown,
            "state": "failed",
            "says": "interrupted. What was computed is kept; the same command goes on from there",
        }
    except (OmegaConfBaseException, HydraException) as error:
        outcome = {**shown, "state": "failed", "says": _help(error)}
    except Exception as error:
        if not isinstance(error, (ValueError, OSError)):
            log.exception("this is a fault of the program, or of a library:")
        outcome = {**shown, "state": "failed", "says": _explain(error, cfg)}
    number = found.job.num if found.mode and found.mode.name == "MULTIRUN" else 0
    write_json(Path(os.environ[SWEEP]) / f"{number}.json", outcome)
    if stopped:  # and with it the rest of the sweep
        raise KeyboardInterrupt


def main() -> None:
    """The command line. Exit code 0: all done; 1: a job failed; 2: the command can not be understood."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what is wrong with a command, and we can say it better
    _speak()
    typed = any(a == "-cd" or a.startswith("--config-dir") for a in sys.argv)
    if not typed and Path("conf").is_dir() and Path("conf").resolve() != CONF.resolve():
        sys.argv += ["--config-dir", str(Path("conf").resolve())]
    if (fault := _single_choice(sys.argv[1:])) is not None:
        sys.exit(_fail(fault))
    folder = Path(_outputs(sys.argv[1:])) / ".sweeps" / uuid.uuid4().hex[:12]
    os.environ[SWEEP] = str(folder.resolve())
    _compose_once()
    try:
        _job()
    except KeyboardInterrupt:
        sys.exit(_close(folder) or _fail("interrupted. What was computed is kept; the same command goes on from there", 1))
    except Exception as error:
        if type(error).__module__.startswith(("hydra", "omegaconf")):
            sys.exit(_fail(_help(error)))
        if isinstance(error, OSError):  # not even the outcome could be written
            sys.exit(_fail(str(error), 1))
        raise
    sys.exit(_close(folder))


def _compose_once() -> None:
    """Hydra composes each job of a sweep to check it and again to run it, which is most of the time of a finished one.
    Each config is kept until its second use; what a job has used is read-only, and of no use to another."""
    compose = ConfigLoaderImpl.load_sweep_config
    kept: dict[tuple[str, ...], DictConfig] = {}

    def once(self: ConfigLoaderImpl, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        typed = tuple(sweep_overrides)
        found = kept.pop(typed, None)
        if found is None or OmegaConf.is_readonly(found.hydra):
            found = kept[typed] = compose(self, master_config, sweep_overrides)
        return found

    ConfigLoaderImpl.load_sweep_config = once  # type: ignore[method-assign]


def _config_dir(found: HydraConf) -> str | None:
    """--config-dir as typed, so that a command can be copied; ./conf needs no typing."""
    path = next((s.path for s in found.runtime.config_sources if s.provider == "command-line"), None)
    return None if path is None or Path(path) == Path("conf").resolve() else path


def _close(folder: Path) -> int:
    """Print the table of a sweep, or the fault of a single job; write results.csv after a sweep."""
    found = [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"), key=lambda p: int(p.stem))]
    for path in folder.glob("*.json"):
        path.unlink()
    if folder.exists():
        folder.rmdir()
    (folder.parent / "multirun.yaml").unlink(missing_ok=True)  # Hydra's; it holds paths of this machine
    failed = [f for f in found if f["state"] == "failed"]
    if any(f["state"] == "done" and f["job"] == "probe" for f in found):
        records.write_results(str(folder.parents[1]))
    if len(found) == 1:
        return _fail(found[0]["says"], 1) if failed else 0
    if found:
        keys = ("job", "encoder", "task", "images", "state", "seconds", "says")
        log.info("\n" + table([{k: _short(f[k]) for k in keys} for f in found]))
        states = [f["state"] for f in found]
        log.info(
            "\n"
            + ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
            + (": nothing was left to do" if set(states) == {"already done"} else "")
        )
    return int(bool(failed))


def _short(value: Any) -> str:
    return text if len(text := str(value)) <= 110 else text[:109] + "…"


def _fail(sentence: str, code: int = 2) -> int:
    print(sentence, file=sys.stderr)
    return code


def _speak() -> None:
    """Our own lines go to stdout as they are. Worker processes of a launcher come here too."""
    log.setLevel(logging.INFO)
    log.propagate = False
    if not log.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)


def _explain(error: Exception, cfg: DictConfig) -> str:
    full = isinstance(error, OSError) and (error.errno == errno.ENOSPC or "No space left" in str(error))
    if full:
        where = f"outputs={cfg.outputs} or store={cfg.store}"
        return f"no space left on the disk of {where}. What was computed before is kept: free some, or type store=/another/disk, and launch again"
    return str(error) or type(error).__name__


# --- what is wrong with a command --------------------------------------------------------------------------------


def _outputs(arguments: list[str]) -> str:
    return next((a.removeprefix("outputs=").strip("'\"") for a in arguments if a.startswith("outputs=")), "outputs")


def _single_choice(arguments: list[str]) -> str | None:
    """encoder=[a,b] would silently take the last: refuse it."""
    groups = sorted(p.name for p in CONF.iterdir() if p.is_dir() and p.name != "hydra")
    for argument in arguments:
        group, _, value = argument.partition("=")
        if group in groups and value.startswith("["):
            several = f" To embed several in one pass type job=embed encoders={value}." if group == "encoder" else ""
            return f"{argument}: {group}= takes one name. To run them one after the other type -m {group}={value.strip('[]')}.{several}"
    return None


def _help(error: Exception) -> str:
    """What to type instead of what Hydra could not understand."""
    text = str(error)
    if match := re.search(r"Could not find '(\w[\w/]*)/([^'/]+)'", text):
        group, name = match.groups()
        options = re.findall(r"^\t(\S+)$", text, re.M)
        return f"{group}={name}: there is no such {group}.{near(name, options)} There are: {', '.join(options)}"
    if match := re.search(r"Ambiguous value for argument '(\w+)=(.*)'", text):
        group, value = match.groups()
        return f"{group}={value}: several values are a sweep. Type -m {group}={value}" + (
            f", or job=embed encoders=[{value}]" if group == "encoder" else ""
        )
    if match := re.search(r"Could not override '([\w.@/]+)'|Key '([\w.]+)' is not in struct", text):
        key = match.group(1) or match.group(2)
        return f"{key}: there is no such option.{near(key, _options())} All options: python probe.py --help. An argument that a YAML leaves out is added by +{key}=VALUE"
    if "Missing mandatory value" in text or type(error).__name__ == "MissingMandatoryValue":
        key = getattr(error, "full_key", None) or "an option"
        return f"{key} has no value. Type {key}=VALUE"
    if type(error).__name__ == "OverrideParseException":
        key, _, value = str(getattr(error, "override", "")).partition("=")
        return f"{key}={value}: a value with = , ( ) [ ] {{ }} or spaces needs quotes inside quotes. Type '{key}=\"{value}\"'"
    return text


def _options() -> list[str]:
    top = [str(k) for k in OmegaConf.load(CONF / "config.yaml") if k not in ("defaults", "hydra")]
    groups = {p.name: p for p in CONF.iterdir() if p.is_dir() and p.name != "hydra"}
    inner = {
        f"{g}.{k!s}"
        for g, p in groups.items()
        for f in p.glob("*.yaml")
        for k in OmegaConf.load(f)
        if g != "data" and k != "_target_"
    }
    return [*top, *groups, *sorted(inner)]


if __name__ == "__main__":
    main()
