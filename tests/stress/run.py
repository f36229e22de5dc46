"""One seeded run: clients do random things to a cluster, the model says what must come of it."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from dask import annotate
from dask._task_spec import Task, TaskRef
from dask.delayed import Delayed
from distributed import Client, Future, Queue, Variable, fire_and_forget
from distributed.client import FutureCancelledError

from tests.stress import probe
from tests.stress.cluster import Cluster, ClusterFailed
from tests.stress.model import Maker, Node, upwards
from tests.stress.tasks import step

#: A future is looked at again this often while it is waited for.
LOOK_SECONDS = 1.0


class Failure(Exception):
    """Something is wrong with the cluster."""


class Party:
    """One client and what it holds."""

    def __init__(self, name: str, address: str):
        self.name = name
        self.client = Client(address, name=name, set_as_default=False, timeout="60s")
        self.held: dict[Node, list[Future]] = {}

    def hold(self, node: Node, future: Future) -> None:
        self.held.setdefault(node, []).append(future)

    def pick(self, rng: Random, most: int) -> list[Node]:
        nodes = list(self.held)
        return rng.sample(nodes, min(len(nodes), most))


class Run:
    def __init__(self, cluster: Cluster, args: Any, seed: int, folder: Path):
        self.cluster = cluster
        self.args = args
        self.seed = seed
        self.rng = Random(seed)
        self.maker = Maker(self.rng, f"s{seed}")
        self.marks = folder / f"marks-{seed}"
        self.marks.mkdir()
        self.observer = Client(cluster.address, name=f"observer-{seed}", set_as_default=False, timeout="60s")
        self.parties: list[Party] = []
        self.parties_made = 0
        self.graphs: list[list[Node]] = []
        self.marked: list[Node] = []
        self.datasets: dict[str, list[Node]] = {}
        self.variables: dict[str, tuple[Variable, Node]] = {}
        self.queues: dict[str, tuple[Queue, list[Node]]] = {}
        self.names = 0
        self.trace = (folder / f"trace-{seed}.log").open("w")
        self.counts: dict[str, int] = {}
        self.last_progress: tuple[float, Any] = (time.monotonic(), None)
        self.daemon_down = False
        #: Nodes given out since the last check, as a bound on what is under way.
        self.under_way = 0
        self.kills = 0

    def say(self, *what: Any) -> None:
        print(f"{time.time():.2f}", *what, file=self.trace, flush=True)

    def new_name(self, what: str) -> str:
        self.names += 1
        return f"{what}-{self.seed}-{self.names}"

    # -------------------------------------------------------------------------------------------------- the mix

    def go(self, seconds: float) -> None:
        rng = self.rng
        actions: list[tuple[int, Callable[[Party], None]]] = [
            (14, self.submit_graph),
            (6, self.submit_single),
            (3, self.map),
            (5, self.build_on_futures),
            (5, self.resubmit),
            (3, self.scatter),
            (10, self.check_some),
            (10, self.release_some),
            (3, self.cancel),
            (4, self.retry),
            (3, self.publish),
            (3, self.get_dataset),
            (2, self.unpublish),
            (2, self.variable),
            (2, self.queue),
            (3, self.fire_and_forget),
            (2, self.close_client),
            (4, self.wait_all),
            (3, self.release_all),
            (6, self.pause),
        ]
        if self.args.kill_workers:
            actions.append((4, self.kill_worker))
        if self.args.kill_daemon:
            actions.append((6, self.kill_daemon))
        skip = set((self.args.skip or "").split(","))
        only = set((self.args.only or "").split(",")) - {""}
        actions = [(w, a) for w, a in actions if a.__name__ not in skip and (not only or a.__name__ in only)]
        weights = [w for w, _ in actions]
        self.observer.wait_for_workers(1, timeout=90)
        end = time.monotonic() + seconds
        steps = 0
        while time.monotonic() < end and (not self.args.steps or steps < self.args.steps):
            steps += 1
            while len(self.parties) < 1 or (len(self.parties) < 3 and rng.random() < 0.1):
                self.parties_made += 1
                self.parties.append(Party(f"party-{self.seed}-{self.parties_made}", self.cluster.address))
            party = rng.choice(self.parties)
            (action,) = rng.choices([a for _, a in actions], weights)
            if self.under_way > self.args.size * 6:
                action = rng.choice((self.wait_all, self.check_some, self.release_all, self.cancel))
            self.say(f"#{steps} {party.name}", action.__name__)
            action(party)
            self.counts[action.__name__] = self.counts.get(action.__name__, 0) + 1
            if steps % 10 == 0:
                self.cluster.check()
                self.look_at_logs()
            time.sleep(rng.choice((0, 0, 0.002, 0.02, 0.1)))
        self.finish()

    # ---------------------------------------------------------------------------------------------- submitting

    def spec(self, node: Node, outside: dict[Node, Future]) -> Task:
        inputs = [outside[d] if d in outside else TaskRef(d.key) for d in node.deps]
        return Task(node.key, step, node.name, node.salt, node.millis, node.mode, node.failures, str(self.marks), *inputs)

    def send(self, party: Party, nodes: list[Node], outside: dict[Node, Future], wanted: list[Node], retries: int, priority: int) -> None:
        """Submit in one of the ways Dask has."""
        rng = self.rng
        client = party.client
        how = rng.choice(("get", "get", "compute", "persist"))
        dsk = {n.key: self.spec(n, outside) for n in nodes}
        self.under_way += len(nodes)
        self.say(f"   {how} {len(nodes)} tasks, {len(outside)} outside, wanted {[str(n.key) for n in wanted][:4]} of {len(wanted)}")
        options: dict[str, Any] = {}
        if retries:
            options["retries"] = retries
        if priority:
            options["priority"] = priority
        if how == "get":
            futures = client.get(dsk, [n.key for n in wanted], sync=False, **options)
        else:
            delayed = [Delayed(n.key, dsk) for n in wanted]
            if how == "compute":
                futures = client.compute(delayed, optimize_graph=rng.random() < 0.5, **options)
            else:
                futures = [f for d in client.persist(delayed, optimize_graph=False, **options) for f in d.dask.values()]
        for node, future in zip(wanted, futures, strict=True):
            assert future.key == node.key, (future.key, node.key)
            party.hold(node, future)

    def size(self) -> int:
        return max(5, min(int(self.rng.lognormvariate(4.2, 0.8) * self.args.size / 60), self.args.size * 10))

    def submit_graph(self, party: Party) -> None:
        rng = self.rng
        retries = rng.choice((0, 0, 2, 5))
        nodes = self.maker.graph(self.size(), [], retries)
        self.graphs.append(nodes)
        self.send(party, nodes, {}, self.wanted(nodes), retries, rng.choice((0, 0, 0, 5, -5)))

    def wanted(self, nodes: list[Node]) -> list[Node]:
        rng = self.rng
        own = set(nodes)
        ends = [n for n in nodes if not own & set(n.dependents)]
        wanted = {*rng.sample(ends, rng.randint(1, len(ends))), *rng.sample(nodes, rng.choice((0, 0, 1, min(10, len(nodes)))))}
        return [n for n in nodes if n in wanted]

    def live(self, party: Party, most: int) -> dict[Node, Future]:
        """Futures of a party that can be built on."""
        picked = {}
        for node in party.pick(self.rng, most):
            future = party.held[node][-1]
            if not future.cancelled():
                picked[node] = future
        return picked

    def build_on_futures(self, party: Party) -> None:
        rng = self.rng
        outside = self.live(party, rng.choice((1, 3, 20)))
        if not outside:
            return
        retries = rng.choice((0, 2))
        nodes = self.maker.graph(self.size(), list(outside), retries)
        needed = {d for n in nodes for d in n.deps}
        try:
            self.send(party, nodes, {n: f for n, f in outside.items() if n in needed}, self.wanted(nodes), retries, 0)
        except (FutureCancelledError, asyncio.CancelledError):
            if not any(n.loose for n in outside):
                raise

    def resubmit(self, party: Party) -> None:
        """Keys that are known already, whole or in part, by any client; new ones on top of some."""
        rng = self.rng
        if not self.graphs:
            return
        old = rng.choice(self.graphs[-12:])
        roots = rng.sample(old, min(len(old), rng.choice((1, 3, 30))))
        if rng.random() < 0.4:
            roots = self.maker.graph(rng.randint(5, 30), roots, 0)
        closure: dict[Node, None] = {}
        for root in roots:
            if root not in closure:
                closure.update(dict.fromkeys(upwards(root)))
        if any(n.mode == "data" for n in closure):
            return
        for node in closure:
            node.unsure = True
        self.send(party, list(closure), {}, [n for n in closure if n in set(roots)], 0, 0)

    def submit_single(self, party: Party) -> None:
        rng = self.rng
        outside = self.live(party, rng.choice((0, 1, 3)))
        node = self.maker.node(list(outside), group="single", retries=rng.choice((0, 3)))
        self.under_way += 1
        try:
            future = party.client.submit(
                step, node.name, node.salt, node.millis, node.mode, node.failures, str(self.marks), *outside.values(),
                key=node.key, retries=node.retries or None, priority=rng.choice((0, 3)),
            )  # fmt: skip
        except (FutureCancelledError, asyncio.CancelledError):
            if not node.loose:
                raise
            return
        party.hold(node, future)

    def map(self, party: Party) -> None:
        rng = self.rng
        count = rng.choice((2, 10, 60))
        outside = self.live(party, rng.choice((0, 1)))
        nodes = [self.maker.node(list(outside), group="map") for _ in range(count)]
        self.under_way += count
        columns = [[getattr(n, a) for n in nodes] for a in ("name", "salt", "millis", "mode", "failures")]
        try:
            futures = party.client.map(
                step, *columns, [str(self.marks)] * count, *([f] * count for f in outside.values()), key=[n.key for n in nodes]
            )
        except (FutureCancelledError, asyncio.CancelledError):
            if not any(n.loose for n in nodes):
                raise
            return
        for node, future in zip(nodes, futures, strict=True):
            party.hold(node, future)

    def scatter(self, party: Party) -> None:
        rng = self.rng
        node = self.maker.node([], group="", mode="data")
        if self.args.kill_workers:
            node.loosen("scattered data may be lost with its worker")
        try:
            futures = party.client.scatter({node.key: node.salt}, broadcast=rng.random() < 0.3)
        except Exception as e:
            if not self.args.kill_workers:
                raise
            self.say("   scatter failed", repr(e))
            return
        party.hold(node, futures[node.key])

    def fire_and_forget(self, party: Party) -> None:
        rng = self.rng
        outside = self.live(party, rng.choice((0, 1, 3)))
        node = self.maker.node(list(outside), group="", mode="mark")
        # Stock never ends the want of a task that is done before it hears of it (it is told in a second message).
        node.millis = 100
        retries = 3
        try:
            with annotate(priority=rng.choice((0, 2))):
                future = party.client.submit(
                    step, node.name, node.salt, node.millis, "mark", 0, str(self.marks), *outside.values(), key=node.key, retries=retries
                )
        except (FutureCancelledError, asyncio.CancelledError):
            if not node.loose:
                raise
            return
        fire_and_forget(future)
        self.marked.append(node)
        if rng.random() < 0.7:
            future.release()
        else:
            party.hold(node, future)

    # ------------------------------------------------------------------------------------------ wants and names

    def release_some(self, party: Party) -> None:
        for node in party.pick(self.rng, self.rng.choice((1, 5, 50))):
            self.release(party, node)

    def release(self, party: Party, node: Node) -> None:
        for future in party.held.pop(node):
            future.release()

    def release_all(self, party: Party) -> None:
        for node in list(party.held):
            self.release(party, node)

    def cancel(self, party: Party) -> None:
        rng = self.rng
        picked = party.pick(rng, rng.choice((1, 1, 5, 1000)))
        if not picked:
            return
        force = rng.random() < 0.3
        futures = [party.held[n][-1] for n in picked]
        for node in picked:
            node.loosen(f"cancelled by {party.name}, force={force}")
        self.say(f"   cancel {len(picked)} force={force} {[str(n.key) for n in picked][:3]}")
        party.client.cancel(futures, force=force)

    def retry(self, party: Party) -> None:
        erred = [n for n, fs in party.held.items() if fs[-1].status == "error"]
        if self.args.window or self.args.stock:
            # Stock's own `retry` fails an assertion where a task below has a second failed input.
            erred = [n for n in erred if simple_failure(n)]
        if erred:
            picked = self.rng.sample(erred, min(len(erred), self.rng.choice((1, 5))))
            for node in picked:
                for above in upwards(node):
                    above.unsure = True
            self.say(f"   retry {[str(n.key) for n in picked]}")
            party.client.retry([party.held[n][-1] for n in picked])

    def publish(self, party: Party) -> None:
        picked = {n: f for n, f in self.live(party, self.rng.choice((1, 4))).items() if not n.loose}
        if picked:
            name = self.new_name("dataset")
            self.say("   publish", name, [str(n.key) for n in picked])
            party.client.publish_dataset(list(picked.values()), name=name)
            self.datasets[name] = list(picked)

    def get_dataset(self, party: Party) -> None:
        if self.datasets:
            name = self.rng.choice(list(self.datasets))
            if any(n.loose for n in self.datasets[name]):
                # A future of a key that the scheduler does not know stays pending for ever, in stock Dask too.
                return
            self.say("   get", name)
            for node, future in zip(self.datasets[name], party.client.get_dataset(name), strict=True):
                party.hold(node, future)

    def unpublish(self, party: Party) -> None:
        if self.datasets:
            name = self.rng.choice(list(self.datasets))
            self.say("   unpublish", name)
            party.client.unpublish_dataset(name)
            del self.datasets[name]

    def variable(self, party: Party) -> None:
        rng = self.rng
        if self.variables and rng.random() < 0.5:
            name = rng.choice(list(self.variables))
            _, node = self.variables[name]
            if node.loose:
                return
            mine = Variable(name, client=party.client)
            if rng.random() < 0.6:
                self.say("   variable get", name, node.key)
                future = self.named(lambda: mine.get(timeout="60s"), node)
                if future is not None:
                    party.hold(node, future)
            else:
                self.say("   variable delete", name)
                mine.delete()
                del self.variables[name]
            return
        picked = {n: f for n, f in self.live(party, 1).items() if not n.loose}
        if picked:
            ((node, future),) = picked.items()
            name = self.new_name("variable") if not self.variables or rng.random() < 0.7 else rng.choice(list(self.variables))
            self.say("   variable set", name, node.key)
            variable = Variable(name, client=party.client)
            variable.set(future)
            self.variables[name] = variable, node

    def named(self, get: Callable[[], Any], node: Node) -> Any:
        try:
            return get()
        except Exception as e:
            # A future of a failed task is told with its error; of a cancelled one it may be gone.
            if type(e).__name__ == "Planned" or node.loose:
                return None
            raise Failure(f"{node.key!r} could not be had by name: {e!r}") from e

    def queue(self, party: Party) -> None:
        rng = self.rng
        full = [n for n, (_, nodes) in self.queues.items() if nodes]
        if full and rng.random() < 0.6:
            name = rng.choice(full)
            node = self.queues[name][1].pop(0)
            self.say("   queue get", name, node.key)
            future = self.named(lambda: Queue(name, client=party.client).get(timeout="60s"), node)
            if future is not None:
                party.hold(node, future)
            return
        picked = {n: f for n, f in self.live(party, 1).items() if not n.loose}
        if picked:
            ((node, future),) = picked.items()
            if not self.queues or rng.random() < 0.3:
                name = self.new_name("queue")
                self.queues[name] = Queue(name, client=party.client), []
            name = rng.choice(list(self.queues))
            self.say("   queue put", name, node.key)
            Queue(name, client=party.client).put(future)
            self.queues[name][1].append(node)

    def close_client(self, party: Party) -> None:
        if len(self.parties) > 1:
            self.close(party)

    def close(self, party: Party) -> None:
        self.parties.remove(party)
        party.client.close(timeout=30)
        party.held.clear()

    # ------------------------------------------------------------------------------------------------- checking

    def check_some(self, party: Party) -> None:
        for node in party.pick(self.rng, self.rng.choice((1, 5, 20))):
            self.check(party, node)

    def wait_all(self, party: Party) -> None:
        for each in self.parties:
            for node in list(each.held):
                self.check(each, node)
        self.under_way = 0

    def check(self, party: Party, node: Node) -> None:
        for future in party.held.get(node, ()):
            self.check_future(party, node, future)

    def check_future(self, party: Party, node: Node, future: Future) -> None:
        while True:
            status, result = "?", None
            try:
                result = future.result(timeout=LOOK_SECONDS)
                status = "finished"
            except TimeoutError:
                self.watch(party, node, future)
                continue
            except BaseException as e:
                if isinstance(e, KeyboardInterrupt):
                    raise
                result = e
                status = future.status if future.status != "finished" else "ungatherable"
                if status == "pending":
                    # Retried, or lost, meanwhile.
                    self.watch(party, node, future)
                    continue
            wrong = node.judge(status, result)
            if wrong:
                raise Failure(f"{party.name}: {node.key!r} ({node.mode}, {len(node.deps)} deps) {wrong}")
            return

    def watch(self, party: Party | None, node: Node | None, future: Future | None) -> None:
        """Called about once a second while something is waited for. Raises Failure if nothing moves any more."""
        self.cluster.check() if not self.daemon_down else None
        self.look_at_logs()
        now = time.monotonic()
        moved = self.observer.run_on_scheduler(probe.progress)
        since, before = self.last_progress
        if moved != before:
            self.last_progress = now, moved
        elif now - since > self.args.hang:
            of = (
                f"{party.name}: {node.key!r} ({node.mode}) is {future.status}, loose={node.why_loose!r}"
                if party and node and future
                else "idle"
            )
            raise Failure(f"hang: nothing moved for {self.args.hang} s; {of}")
        time.sleep(0.1)

    def look_at_logs(self) -> None:
        complaints = self.cluster.complaints()
        if complaints:
            raise Failure("log: " + "\n".join(complaints[:5]))

    def pause(self, party: Party) -> None:
        time.sleep(self.rng.choice((0.05, 0.3, 1)))

    # -------------------------------------------------------------------------------------------------- killing

    def kill_worker(self, party: Party) -> None:
        if len(self.cluster.workers) >= self.cluster.wanted_workers:
            name = self.rng.choice(sorted(self.cluster.workers))
            self.say("   kill", name)
            self.kills += 1
            self.cluster.kill_worker(name)
            self.cluster.start_worker()

    def kill_daemon(self, party: Party) -> None:
        self.say("   kill daemon")
        self.kills += 1
        self.cluster.kill_daemon()
        pause = self.rng.choice((0, 0, 0.5, 3))
        if pause and self.rng.random() < 0.5:
            # The mix goes on without it.
            self.daemon_down = True

            def later() -> None:
                time.sleep(pause)
                self.cluster.start_daemon()
                self.daemon_down = False

            threading.Thread(target=later, daemon=True).start()
            time.sleep(pause + 0.1)
        else:
            time.sleep(pause)
            self.cluster.start_daemon()

    # ------------------------------------------------------------------------------------------------ the end

    def finish(self) -> None:
        self.say("finish")
        rng = self.rng
        if self.parties:
            self.wait_all(self.parties[0])
        waiting = [n for n in self.marked if not n.loose and not any(n.failing())]
        self.until(lambda: [n.name for n in waiting if not (self.marks / n.name).exists()], "fire-and-forget tasks that did not run")
        for name in list(self.datasets):
            self.observer.unpublish_dataset(name)
        for name in self.variables:
            mine = Variable(name, client=self.observer)
            mine.delete()
        for name, (_, nodes) in self.queues.items():
            mine = Queue(name, client=self.observer)
            for node in nodes:
                got = self.named(lambda mine=mine: mine.get(timeout="60s"), node)
                if got is not None:
                    got.release()
            mine.close()
        for party in list(self.parties):
            if rng.random() < 0.6:
                for node in rng.sample(list(party.held), len(party.held)):
                    self.release(party, node)
            self.close(party)
        self.until(self.left_in_scheduler, "left in the scheduler")
        self.until(self.left_in_store, "left in the store")
        self.observer.close()

    def left_in_scheduler(self) -> Any:
        left = self.observer.run_on_scheduler(probe.leftovers)
        counts = {"task_groups", "prefixes off", "ledger debts", "pager.submissions"}
        if left and self.args.tolerate_drift and set(left) <= counts:
            # What a dead daemon could not say is missing in these counts.
            print(f"seed {self.seed}: drift {str(left)[:300]}", flush=True)
            return None
        return left

    def left_in_store(self) -> Any:
        status = self.cluster.status()
        if status.get("tasks") == 0 and not status.get("graphs") and not status.get("todo"):
            return None
        return status

    def until(self, left: Callable[[], Any], what: str) -> None:
        """Wait until `left()` is empty; Failure if it does not change for a while."""
        since, before = time.monotonic(), None
        while rest := left():
            self.cluster.check()
            self.look_at_logs()
            if rest != before:
                since, before = time.monotonic(), rest
            if time.monotonic() - since > self.args.leftover:
                raise Failure(f"{what}: {str(rest)[:3000]}")
            time.sleep(0.1)

    def tell_state(self) -> None:
        try:
            state = self.observer.run_on_scheduler(probe.state)
            for k, v in state.items():
                if k == "shown":
                    print("\n".join(v))
                else:
                    print(f"{k}: {v}")
            for k, v in self.observer.run_on_scheduler(probe.stories).items():
                print("story of", k, *v, sep="\n    ")
        except Exception as e:
            print("no state of the scheduler:", repr(e))
        print("taskdb status:", json.dumps(self.cluster.status())[:3000])
        print(self.cluster.tasks())


def simple_failure(node: Node) -> bool:
    """Whether all that failed with this node failed because of one task alone."""
    roots = [n for n in upwards(node) if n.mode in ("fail", "flaky")]
    stack, seen = list(roots), set(roots)
    while stack:
        current = stack.pop()
        certain, unsure = current.failing()
        if len(certain | unsure) > 1:
            return False
        new = [d for d in current.dependents if d not in seen]
        seen.update(new)
        stack.extend(new)
    return True


def run_seed(cluster: Cluster, args: Any, seed: int, folder: Path) -> str | None:
    """One seed on a cluster that is up. What went wrong, or None."""
    run = Run(cluster, args, seed, folder)
    start = time.monotonic()
    try:
        run.go(args.seconds)
    except (Failure, ClusterFailed) as e:
        text = str(e)
    except Exception as e:
        import traceback

        text = f"action raised: {e!r}\n{traceback.format_exc()}"
    else:
        shutil.rmtree(run.marks, ignore_errors=True)
        print(
            f"seed {seed} window {args.window}: ok, {time.monotonic() - start:.0f} s, kills {run.kills}, {sum(run.counts.values())} steps, "
            f"{run.maker._count} tasks",
            flush=True,
        )
        return None
    print(f"\nseed {seed} window {args.window}: FAILED after {time.monotonic() - start:.0f} s: {text}")
    complaints = cluster.complaints()
    if complaints:
        print("\n".join(complaints[:5]))
    run.tell_state()
    return text
