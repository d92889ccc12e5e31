"""Is it the same training if machines come and go? ``python -m benchmarks.elastic``.

One to four ranks, each with an agent of its own as ``torchrun`` starts it, train a small network in fp64. Agents and
their processes are killed with -9 at random places, and others join in mid-epoch. Every training must end with the
weights, steps, rates and samples of an undisturbed one. Stock Lightning runs under the same agents.
"""

import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from benchmarks import elastic_worker as worker
from benchmarks.output import Record, at_least, at_most, benchmark, error, plain, shown
from benchmarks.trainers import relative_error

MOST_RANKS = 4
EPOCHS = 30
PAUSE = 0.3  # seconds of a window
TOGETHER = 2.0  # seconds in which ranks that have found each other begin to train
HANGS_AFTER = 150.0  # seconds without a window
ANYWHERE = "anywhere"  # a place that the clock draws
WINDOWS = worker.SAMPLES // worker.EFFECTIVE  # of an epoch
FORK = multiprocessing.get_context("fork")


def serve(port: Any) -> None:
    """Keep the rendezvous, which no agent may host because every agent may die."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.put(store.port)
    signal.pause()


def run_agent(name: str, port: int, folder: Path, settings: Mapping[str, Any]) -> None:
    """Be an agent of one process, as ``torchrun --nnodes=1:4 --nproc-per-node=1`` is; its workers are forks."""
    os.setsid()
    with (folder / f"agent-{name}.txt").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["ELASTIC_AGENT"] = name
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else nobody can join while rank 0 stays (torch 2.15)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=MOST_RANKS,
        nproc_per_node=1,
        run_id="benchmark",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"is_host": "false", "last_call_timeout": "6", "keep_alive_interval": "1"},
        max_restarts=1000,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, worker.start)(str(folder), json.dumps(dict(settings)))


class Campaign:
    """One training, its agents, and what is done to them."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.settings = settings
        self.agents: dict[str, Any] = {}
        self.kills: Counter[str] = Counter()
        self.joins = 0
        self.started_again = 0
        self.broken: list[str] = []
        folder.mkdir(parents=True)
        port = FORK.Queue()
        self.store = FORK.Process(target=serve, args=(port,))
        self.store.start()
        self.port = port.get()

    def start(self) -> None:
        """Start an agent."""
        name = str(len(self.agents))
        process = FORK.Process(target=run_agent, args=(name, self.port, self.folder, self.settings))
        process.start()
        self.agents[name] = process

    def alive(self) -> list[str]:
        return [name for name, process in self.agents.items() if process.is_alive()]

    def lines(self) -> list[dict[str, Any]]:
        found = []
        for path in self.folder.glob("diary-*.jsonl"):
            for line in path.read_text().splitlines():
                with suppress(ValueError):  # half a line
                    found.append(json.loads(line))
        return sorted(found, key=lambda line: line["time"])

    def latest(self) -> list[dict[str, Any]]:
        """Return the starts of the ranks that train now, by rank; empty if they have not all begun."""
        alive = self.alive()
        begun = [line for line in self.lines() if line["kind"] == "train"]
        now = [line for line in begun if line["agent"] in alive and begun[-1]["time"] - line["time"] < TOGETHER]
        latest = {line["agent"]: line for line in now if line["world"] == begun[-1]["world"]}
        is_complete = bool(latest) and len(latest) == begun[-1]["world"]
        return sorted(latest.values(), key=lambda line: line["rank"]) if is_complete else []

    def has_ended(self) -> bool:
        return (self.folder / "end.pt").is_file()

    def wait(self, reached: Callable[[], bool], what: str) -> bool:
        """Wait until something is reached; if there is no new window for long, note that the training hangs."""
        seen = len(self.lines())
        since = time.monotonic()
        while not reached():
            time.sleep(0.05)
            if len(self.lines()) != seen:
                seen = len(self.lines())
                since = time.monotonic()
            if not self.alive() and not reached():  # agents end if the rendezvous takes more than a minute
                self.start()
                self.started_again += 1
            if time.monotonic() - since > HANGS_AFTER:
                self.broken.append(f"hung: {what}")
                return False
        return True

    def wait_for_windows(self, count: int) -> bool:
        """Wait until all agents that are alive have trained so many windows together, or the training has ended."""

        def reached() -> bool:
            if self.has_ended():
                return True
            now = self.latest()
            starts = {line["start"] for line in now}
            steps = [line["step"] for line in self.lines() if line["kind"] == "step" and line["start"] in starts]
            return bool(now) and bool(steps) and max(steps) >= now[0]["step"] + count

        return self.wait(reached, f"{len(self.alive())} agents after {dict(self.kills)}, {self.joins} joins")

    def kill(self, place: str, rng: random.Random) -> None:
        """Kill an agent and its process at a place; who writes checkpoints is rank 0."""
        now = self.latest()
        if not now or self.has_ended():
            return
        victim = now[0] if place == worker.WRITE else rng.choice(now)
        process = self.agents[victim["agent"]]
        if place == ANYWHERE:
            time.sleep(rng.random())
            for pid in victim["pids"]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            (self.folder / f"kill-{victim['agent']}").write_text(place)
        if self.wait(lambda: not process.is_alive() or self.has_ended(), f"to be killed in {place}"):
            self.kills[place] += not self.has_ended()

    def close(self) -> None:
        """End what is left of the processes."""
        pids = [pid for line in self.lines() if line["kind"] == "train" for pid in line["pids"][1:]]
        alive = self.alive()
        for name in alive:
            self.agents[name].join(60)
            self.agents[name].kill()
        for line in self.lines():
            if line["kind"] == "train" and line["agent"] in alive:
                with suppress(ProcessLookupError):
                    os.kill(line["pids"][1], signal.SIGKILL)
        assert pids or self.broken or not self.agents
        self.store.kill()

    def lost(self) -> list[int]:
        """Return the windows that each start had to train again."""
        found = []
        furthest = 0
        for line in self.lines():
            if line["kind"] == "train" and line["rank"] == 0 and furthest:
                found.append(furthest - line["step"])
            if line["kind"] == "step":
                furthest = max(furthest, line["step"])
        return found

    def steps(self) -> dict[int, dict[str, Any]]:
        """Return the samples and the rate of each step, as it was trained last."""
        lines = self.lines()
        last = {line["step"]: line["start"] for line in lines if line["kind"] == "step" and line["rank"] == 0}
        begun = {line["start"]: line["time"] for line in lines if line["kind"] == "train"}
        worlds = {line["start"]: line["world"] for line in lines if line["kind"] == "train"}
        found: dict[int, dict[str, Any]] = {}
        for step, start in last.items():
            same = [
                line
                for line in lines
                if line["kind"] == "step"
                and line["step"] == step
                and abs(begun[line["start"]] - begun[start]) < TOGETHER
            ]
            samples = sorted({index for line in same for index in line["samples"]})
            counted = sum(len(line["samples"]) for line in same)
            found[step] = {
                "samples": samples,
                "counted": counted,
                "rate": same[0]["rate"],
                "ranks": len(same) == worlds[start],
            }
        return found

    def compared(self, undisturbed: "Campaign") -> float:
        """Compare with the undisturbed training, note what differs, and return the difference of the weights."""
        if not self.has_ended():
            self.broken.append("has not ended")
            return float("nan")
        ours = torch.load(self.folder / "end.pt")
        theirs = torch.load(undisturbed.folder / "end.pt")
        mine, expected = self.steps(), undisturbed.steps()
        if ours["steps"] != theirs["steps"]:
            self.broken.append(f"{ours['steps']} steps instead of {theirs['steps']}")
        if {*mine} != {*expected}:
            self.broken.append(f"steps {sorted({*mine} ^ {*expected})} are in one diary alone")
        for step in sorted({*mine} & {*expected}):
            if mine[step]["samples"] != expected[step]["samples"]:
                self.broken.append(f"other samples in step {step}")
            if abs(mine[step]["rate"] / expected[step]["rate"] - 1) > 1e-12:
                self.broken.append(f"another rate in step {step}")
        difference = relative_error(ours["weights"], theirs["weights"])
        if not difference <= 1e-12:
            self.broken.append(f"weights differ by {difference:.1e}")
        if abs(ours["val_loss"] / theirs["val_loss"] - 1) > 1e-12:
            self.broken.append("another validation loss")
        return difference


def undisturbed(folder: Path, ranks: int = 1, **settings: Any) -> Campaign:
    """Train without disturbance."""
    campaign = Campaign(folder, settings)
    for _ in range(ranks):
        campaign.start()
    campaign.wait(campaign.has_ended, "undisturbed")
    campaign.close()
    return campaign


def disturbed(folder: Path, rng: random.Random, kills: int, ranks: int, **settings: Any) -> Campaign:
    """Train while agents are killed and join at random moments, with one to four ranks."""
    campaign = Campaign(folder, settings)
    for _ in range(ranks):
        campaign.start()
    while not campaign.has_ended() and not campaign.broken:
        if not campaign.wait_for_windows(rng.randint(1, 8)) or campaign.has_ended():
            break
        count = len(campaign.alive())
        left = kills - campaign.kills.total()
        if left > 0 and (count == MOST_RANKS or rng.random() < 0.6):
            campaign.kill(rng.choice((*worker.PLACES, ANYWHERE)), rng)
            if not campaign.alive():
                campaign.start()
        elif left > 0 and count < MOST_RANKS:
            campaign.start()
            campaign.joins += 1
        else:
            campaign.wait(campaign.has_ended, "the rest")
    campaign.close()
    return campaign


def measure(campaigns: int = 7, kills: int = 6, seed: int = 0) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        expected = {}
        settings = {mode: {"mode": mode, "epochs": EPOCHS} for mode in ("loader", "step")}
        for mode in settings:
            expected[mode] = undisturbed(root / f"undisturbed-{mode}", **settings[mode])
        waiting = [*range(campaigns)]
        running: list[Any] = []
        while waiting or running:  # four at a time: most of the time they wait for a rendezvous
            if waiting and len(running) < 4:
                number = waiting.pop(0)
                arguments = (root, number, seed, kills, expected, settings)
                running.append(FORK.Process(target=run_campaign, args=arguments))
                running[-1].start()
            running = [each for each in running if each.is_alive()]
            time.sleep(0.5)
        rows = [json.loads((root / f"row-{number}.json").read_text()) for number in range(campaigns)]
        stock = [stock_run(root / kind, kind, expected["loader"]) for kind in ("stock", "stock helped")]
        speed = speed_of_a_life(root)
    loader = [each for each in rows if each["mode"] == "loader"]
    lost = [count for each in loader for count in each["lost"]]
    broken = [sentence for each in rows for sentence in each["broken"]]
    totals = {"kills": sum(each["kills_total"] for each in rows), "joins": sum(each["joins"] for each in rows)}
    targets = [
        at_least("kills", totals["kills"], 40),
        at_least("joins in mid-epoch", totals["joins"], 15),
        at_most("trainings that differ or hang", len(broken), 0),
        at_most("weights, relative to an undisturbed run", max(each["difference"] for each in rows), 1e-12),
        at_most("windows lost at a start, data cut in the loader", max(lost), 5 + 2),
        at_least("samples a second with a kill every 60 windows, of undisturbed", speed["ratio"], 0.9),
    ]
    return {
        "runs": rows,
        "stock": stock,
        "speed": speed,
        **totals,
        "missed": broken,
        "targets": plain(targets),
    }


def cost_of_checkpoints(root: Path, turns: int = 7, pause: float = 0.0) -> float:
    """Return the time of a fit with a checkpoint every 20 windows, of that without: the fastest of several turns.

    Windows compute on the processor that writes, or wait for a ``pause`` in seconds, as for a device.
    """
    times: dict[int, list[float]] = {0: [], 20: []}
    for turn in range(turns):
        for every, found in times.items():
            folder = root / f"cost-{pause}-{every}-{turn}"
            folder.mkdir()
            start = time.perf_counter()
            worker.train(str(folder), mode="loader", epochs=4, every=every, width=768, pause=pause)
            found.append(time.perf_counter() - start)
    return min(times[20]) / min(times[0])


def run_campaign(
    root: Path, number: int, seed: int, kills: int, expected: Mapping[str, Campaign], settings: Mapping[str, Any]
) -> None:
    """Run one disturbed training; one in seven is cut in the step."""
    rng = random.Random(f"{seed}-{number}")
    mode = "step" if number % 7 == 3 else "loader"
    ranks = (4, 3, 1, 2)[number % 4]
    campaign = disturbed(root / f"run-{number}", rng, kills, ranks, pause=PAUSE, **settings[mode])
    found = row(campaign, mode, ranks, campaign.compared(expected[mode]))
    (root / f"row-{number}.json").write_text(json.dumps(found))
    print(f"{number}: {found}", flush=True)


def row(campaign: Campaign, mode: str, ranks: int, difference: float) -> dict[str, Any]:
    starts = [line["world"] for line in campaign.lines() if line["kind"] == "train" and line["rank"] == 0]
    return {
        "mode": mode,
        "ranks": ranks,
        "worlds": starts,
        "kills": dict(campaign.kills),
        "kills_total": campaign.kills.total(),
        "joins": campaign.joins,
        "started_again": campaign.started_again,
        "lost": campaign.lost(),
        "difference": difference,
        "broken": campaign.broken,
    }


def stock_run(folder: Path, kind: str, expected: Campaign) -> dict[str, Any]:
    """Let stock Lightning begin on two ranks, of which one is killed and does not come back."""
    campaign = Campaign(folder, {"mode": kind, "epochs": EPOCHS, "pause": PAUSE / 10, "ranks": 2})
    campaign.start()
    campaign.start()
    campaign.wait_for_windows(30)
    campaign.kill(worker.BETWEEN, random.Random(0))
    errors: list[str] = []

    def is_over() -> bool:
        for path in folder.glob("agent-*.txt"):
            errors.extend(line for line in path.read_text().splitlines() if "does not match the world size" in line)
        return campaign.has_ended() or bool(errors)

    campaign.wait(is_over, kind)
    for name in campaign.alive() if errors else ():
        campaign.agents[name].kill()
    campaign.close()
    if errors:
        return {"kind": kind, "error": errors[0].strip()}
    end = torch.load(folder / "end.pt")
    theirs = torch.load(expected.folder / "end.pt")
    samples = [line["samples"] for line in campaign.lines() if line["kind"] == "step"]
    return {
        "kind": kind,
        "steps": [end["steps"], theirs["steps"]],
        "samples_of_a_step_at_the_end": len(samples[-1]),
        "difference": relative_error(end["weights"], theirs["weights"]),
    }


def speed_of_a_life(root: Path) -> dict[str, Any]:
    """Compare samples a second on two ranks, with a kill every 60 windows and without; rendezvous aside."""
    settings = {"mode": "loader", "epochs": 15, "pause": 0.1}
    calm = undisturbed(root / "calm", 2, **settings)
    campaign = Campaign(root / "killed", settings)
    campaign.start()
    campaign.start()
    rng = random.Random(1)
    while not campaign.has_ended() and not campaign.broken:
        if campaign.wait_for_windows(60) and not campaign.has_ended():
            campaign.kill(ANYWHERE, rng)
            campaign.start()
    campaign.close()
    rates = [samples_a_second(each) for each in (calm, campaign)]
    names = {"undisturbed": rates[0], "killed": rates[1], "kills": campaign.kills.total(), "lost": campaign.lost()}
    return {**names, "ratio": rates[1] / rates[0], "broken": campaign.broken}


def samples_a_second(campaign: Campaign) -> float:
    """Return the useful samples by the time in which ranks that had found each other have worked."""
    lines = [line for line in campaign.lines() if line["rank"] == 0]
    seconds = 0.0
    for start in {line["start"] for line in lines if line["kind"] == "set up"}:
        times = [line["time"] for line in lines if line["start"] == start and line["kind"] in ("set up", "step")]
        seconds += max(times) - min(times)
    return len(campaign.steps()) * worker.EFFECTIVE / seconds


def text(record: Record) -> str:
    rows = []
    for mode in ("loader", "step"):
        some = [each for each in record["runs"] if each["mode"] == mode]
        if not some:
            continue
        lost = sorted(count for each in some for count in each["lost"])
        rows.append(
            (
                f"cut in the {mode}",
                str(len(some)),
                str(sum(each["kills_total"] for each in some)),
                str(sum(each["joins"] for each in some)),
                f"{lost[len(lost) // 2]}, {lost[-1]}" if lost else "–",
                error(max(each["difference"] for each in some)),
            )
        )
    places: Counter[str] = Counter()
    for each in record["runs"]:
        places.update(each["kills"])
    killed = ", ".join(f"{place} {count}" for place, count in places.most_common())
    by_kind = {each["kind"]: each for each in record["stock"]}
    helped = by_kind["stock helped"]
    refused = by_kind["stock"].get("error", "no error").partition("ValueError: ")[2]
    outcome = helped.get("error") or (
        f"it ends after {helped['steps'][0]} steps instead of {helped['steps'][1]}, at the end of "
        f"{helped['samples_of_a_step_at_the_end']} samples instead of {worker.EFFECTIVE}; weights differ by "
        f"{error(helped['difference'])}"
    )
    speed = record["speed"]
    caption = (
        f"Killed with -9: {killed}. A checkpoint every 5 windows; of data cut in the step, at the end of an epoch.\n"
        "Windows lost: median and most at a start.\n"
        f"With a kill every 60 windows on two ranks: {speed['ratio']:.2f} of the samples a second of an undisturbed "
        "run, rendezvous aside.\n"
        f"Stock Lightning, one of two ranks killed: {refused} Helped past that, "
        f"{outcome}."
    )
    titles = ("runs", "killed", "joined", "windows lost", "worst difference")
    return shown(("",), titles, rows, caption)


main = benchmark("elastic", __doc__, measure, text, {"campaigns": 1, "kills": 2})
if __name__ == "__main__":
    raise SystemExit(main())
