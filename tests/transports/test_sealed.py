"""With a secret, who can write to the store and does not know it changes nothing unseen: each
attack is an error that names the rank and the topic."""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import threading
import time

import pytest

from pycomm import _C, _test, log
from pycomm.communicator import Communicator
from pycomm.errors import Error, PeerLost, Timeout
from tests.ranks import good, on_threads
from tests.transports.wire_peer import sealed

SECRET = "sixteen bytes, at least"
SALT = b"pycomm secret 1"
KEY = hashlib.scrypt(SECRET.encode(), salt=SALT, n=2**14, r=8, p=1, dklen=32)
SECONDS = 10.0


class OpenStore:
    """A store as torch's, whose connections anybody can make: `tamper` is what a stranger does to
    what is written."""

    def __init__(self, appends: bool = True, tamper=lambda key, value: value) -> None:
        self.appends, self.tamper = appends, tamper
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        with self.lock:
            self.values[key] = self.tamper(key, value)

    def append(self, key: str, value: bytes) -> None:
        with self.lock:
            self.values[key] = self.values.get(key, b"") + self.tamper(key, value)

    def find(self, key: str) -> bytes | None:
        with self.lock:
            return self.values.get(key)


def exchange(store: OpenStore, size: int = 2, secrets=lambda rank: SECRET) -> list:
    """Return what each rank gets of an exchange: the values of all, or an error."""

    def meet(rank: int):
        try:
            of = _test.python_store(store)
            return _test.exchange(
                of,
                "g",
                "topic",
                rank,
                size,
                f"value {rank}",
                2.0 * (size < 33) + 3.0,
                secrets(rank),
            )
        except Error as error:
            return error

    return on_threads(range(size), meet, 30)


def entry(rank: int, text: bytes) -> bytes:
    return b"%d %d:" % (rank, len(text)) + text


def rank_of(key: str, value: bytes) -> int:
    """The rank that wrote this entry of a joint key, or this key of its own."""
    return int(key.rpartition("/")[2] if "/all from" not in key else value.split(b" ")[0])


def as_written(key: str, text: bytes, rank: int) -> bytes:
    return entry(rank, text) if "/all from" in key else text


@pytest.mark.parametrize("size", [2, 40])
@pytest.mark.parametrize("appends", [False, True])
def test_values_arrive_that_carry_a_proof(appends, size):
    store = OpenStore(appends)
    words = [f"value {rank}" for rank in range(size)]
    assert exchange(store, size) == [words] * size
    assert all(b"sealed:" in value for value in store.values.values())
    nonce = b"\x1enonce\x1f"
    text = store.values["g/topic/1"] if not appends or size > 32 else None
    if text is not None:
        _, _, value = text.split(b":", 2)
        assert text == sealed("topic/1/", value, KEY, "g")
        assert value.startswith(b"value 1" + nonce)


def resealed(topic: str, key: bytes = KEY, group: str = "g"):
    """Return an attack: the value of rank 1 with the proof of another topic, key or group."""
    return lambda text: sealed(topic, text.split(b":", 2)[2], key, group)


ATTACKS = {
    "unproven": lambda text: b"value of a stranger",
    "changed": lambda text: text.replace(b"value 1", b"value 7"),
    "by another key": resealed("topic/1/", b"another key"),
    "under another topic": resealed("other/1/"),
    "of another rank": resealed("topic/0/"),
    "of another group": resealed("topic/1/", group="h"),
    "cut short": lambda text: text[:40],
}


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_false_value_is_refused_and_named(appends, attack):
    def tamper(key: str, value: bytes) -> bytes:
        if rank_of(key, value) != 1:
            return value
        return as_written(key, attack(value.partition(b":")[2] if appends else value), 1)

    outcomes = exchange(OpenStore(appends, tamper))
    assert "rank 0: what the store has of rank 1 (topic of group" in str(outcomes[0])
    assert "proof of the secret" in str(outcomes[0])
    assert isinstance(outcomes[1], Error)  # it sees that its value is another one


@pytest.mark.parametrize("secret", [SECRET, ""])
@pytest.mark.parametrize("attack", ["false", "replayed"])
@pytest.mark.parametrize("size", [2, 40])
def test_a_second_value_of_a_rank_is_refused(secret, attack, size):
    """Otherwise the last one would win, or the first."""

    def tamper(key: str, value: bytes) -> bytes:
        if "/all from" not in key or "/complete" in key or rank_of(key, value) != 1:
            return value
        return value + (entry(1, b"false") if attack == "false" else value)

    outcomes = exchange(OpenStore(True, tamper), size, lambda rank: secret)
    found = [str(error) for error in outcomes if "rank 1 (topic of group" in str(error)]
    assert found, outcomes
    assert all("is there twice" in text for text in found)
    assert all(isinstance(outcome, Error) for outcome in outcomes)


def test_a_false_list_of_all_values_is_refused():
    """In large groups one rank reads the values, and the others what it has read."""

    def tamper(key: str, value: bytes) -> bytes:
        return value.replace(b"value 7", b"value 8") if "/complete" in key else value

    outcomes = exchange(OpenStore(True, tamper), 40)
    assert isinstance(outcomes[0], list)
    assert all("of rank 7 (topic" in str(outcome) for outcome in outcomes[1:])


@pytest.mark.parametrize("junk", [b"junk", b"-1 3:abc", b"1 99:abc", b"7 3:abc", b"1 \xff:"])
@pytest.mark.parametrize("secret", [SECRET, ""])
def test_bytes_that_no_rank_writes_are_refused(junk, secret):
    store = OpenStore(True)
    store.values["g/topic/all from 0"] = junk
    for outcome in exchange(store, 2, lambda rank: secret):
        assert isinstance(outcome, Error)
        assert "what no rank publishes in a group of 2; give all ranks the same" in str(outcome)


@pytest.mark.parametrize("appends", [False, True])
def test_ranks_with_other_secrets_are_told_at_once(appends):
    first, second = exchange(OpenStore(appends), 2, lambda rank: SECRET + str(rank))
    assert "rank 0: what the store has of rank 1 (topic of group" in str(first)
    assert "a wrong proof of the secret" in str(first)
    assert "PYCOMM_SECRET" in str(second)
    with_secret, without = exchange(OpenStore(appends), 2, lambda rank: SECRET * (rank == 0))
    assert "of rank 1 (topic" in str(with_secret)
    assert "has no proof of the secret" in str(with_secret)
    assert "of rank 0 (topic" in str(without)
    assert "this rank was given none" in str(without)


# ------------------------------------------------------------------ whole groups


def group(*stores: OpenStore, size: int = 2, come: int | None = None, **options) -> list:
    """Return for each rank that comes True, or the error with which its group began.

    Ranks share a store, or each has its own.
    """
    given = dict(transport="tcp", timeout=3.0, secret=SECRET, tls="off") | options

    def run(rank: int):
        try:
            of = _test.python_store(stores[rank % len(stores)])
            with Communicator(of, rank, size, **given) as c:
                c.barrier()
                return True
        except Error as error:
            return error

    return on_threads(range(come or size), run, 30)


def joint_entries(joint: bytes) -> dict[int, bytes]:
    found = {}
    while joint:
        head, _, rest = joint.partition(b":")
        rank, size = map(int, head.split(b" "))
        found[rank], joint = rest[:size], rest[size:]
    return found


def changing(topic, change):
    """Return a tampering with what each rank says of a topic: ``change(rank, text)``."""

    def tamper(key: str, value: bytes) -> bytes:
        if f"/{topic}/all from" not in key:
            return value
        rank = rank_of(key, value)
        return entry(rank, change(rank, value.partition(b":")[2]))

    return tamper


class Seen(OpenStore):
    """What a rank sees of a store where ``change(entries)`` shows it other first values."""

    def __init__(self, store: OpenStore, change) -> None:
        super().__init__(store.appends)
        self.store, self.change = store, change
        self.set, self.append = store.set, store.append  # type: ignore[method-assign]

    def find(self, key: str) -> bytes | None:
        value = self.store.find(key)
        if key != "default/here/all from 0" or value is None:
            return value
        entries = joint_entries(value)
        self.change(entries)
        return b"".join(entry(rank, text) for rank, text in entries.items())


def test_a_card_of_a_stranger_is_refused():
    """It would make rank 1 connect to him, who passes on the handshake."""

    with socket.create_server(("127.0.0.1", 0)) as stranger:
        his = str(stranger.getsockname()[1]).encode()

        def change(rank: int, text: bytes) -> bytes:
            port = text.partition(b"127.0.0.1:")[2].partition(b" ")[0]
            return text.replace(port, his) if rank == 0 else text

        tamper = changing("tcp-card", change)
        for outcome in group(OpenStore(True, tamper)):
            assert "of rank 0 (tcp-card of group" in str(outcome)
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.accept()
        # Without a secret the card is believed: the attack is one.
        assert True not in group(OpenStore(True, tamper), secret="")
        stranger.accept()[0].close()


@pytest.mark.parametrize("replayed", [0, 1])
def test_a_value_of_an_earlier_group_is_refused(replayed):
    """Its proof is right, and its group had the same name and secret."""
    earlier = OpenStore(True)
    assert group(earlier) == [True, True]
    old = joint_entries(earlier.values["default/here/all from 0"])
    tampered = []

    def change(rank: int, text: bytes) -> bytes:
        tampered.extend([rank] * (rank == replayed))
        return old[rank] if rank == replayed else text

    outcomes = group(OpenStore(True, changing("here", change)))
    assert tampered
    assert "is not what it has published" in str(outcomes[replayed])
    assert all(isinstance(outcome, Error) for outcome in outcomes)


def test_a_rank_that_is_told_other_nonces_joins_nobody():
    """A stranger who shows each rank another store can replay a first value to one of them; what
    that rank says afterwards is refused."""
    earlier = OpenStore(True)
    assert group(earlier) == [True, True]
    old = joint_entries(earlier.values["default/here/all from 0"])
    store = OpenStore(True)

    def replay(entries: dict[int, bytes]) -> None:
        if 0 in entries:
            entries[0] = old[0]

    # Of two that refuse each other, one tells the other first.
    for outcome in group(store, Seen(store, replay)):
        assert "(tcp-card of group" in str(outcome)
        assert "wrong proof" in str(outcome)


NOTICE_HEAD = struct.Struct("<BBHiiI")  # kind, 0, ranks, from, rank, bytes of text


@pytest.mark.parametrize(
    "reason",
    [
        b"",
        b"no notice",
        NOTICE_HEAD.pack(3, 0, 1, 1, 2**31 - 1, 4) + struct.pack("<i", -(2**31)) + b"gone",
        NOTICE_HEAD.pack(3, 0, 128, -1, -1, 2**32 - 1),
        NOTICE_HEAD.pack(255, 0, 0, 0, 0, 0),
        NOTICE_HEAD.pack(0, 0, 0, 1, 0, 3) + b"\xff\x00\xfe",
    ],
)
def test_a_lying_reason_ends_a_set_up_with_an_error(reason):
    """A rank that knows the secret gives up, and says why in bytes that no rank writes."""
    store = OpenStore(True)
    store.values["default/given up"] = sealed("given up", reason, KEY, "default")

    (outcome,) = group(store, come=1)
    assert isinstance(outcome, Error)
    assert "has left the rendezvous" in str(outcome) or isinstance(outcome, PeerLost)
    assert "Traceback" not in str(outcome)


def test_announcements_of_one_rank_are_not_those_of_another():
    """A rank that announces a topic twice does not speak for one that does not."""

    def change(rank: int, text: bytes) -> bytes:
        head, mark, rest = text.partition(b"\x1elink\x1f")
        assert mark
        link, _, more = rest.partition(b"\x1e")
        return head + (mark + b"junk" + mark + link) * (rank == 1) + b"\x1e" + more

    # Rank 0 says nothing now.
    for outcome in group(OpenStore(True, changing("here", change)), secret=""):
        assert "rank 0 says" in str(outcome)
        assert "junk" not in str(outcome)


@pytest.mark.parametrize("name", ["given up", "met/1"])
def test_words_of_single_ranks_carry_a_proof_too(name):
    store = OpenStore(True)
    store.set(f"default/{name}", b"yes")
    start = group(store)
    if name == "given up":
        # Ranks that meet before they look for it have no need of it; nobody believes it.
        named = f'"{name}" of group "default"'
        assert all(outcome is True or named in str(outcome) for outcome in start), start
    assert store.values.get("default/met/0", b"sealed:").startswith(b"sealed:")


# ------------------------------------------------------------------ without a secret


class CountingStore(OpenStore):
    """A store as torch's, which also counts and forgets."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.counts: dict[str, int] = {}

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self.counts[key] = self.counts.get(key, 0) + amount
            return self.counts[key]

    def erase(self, key: str) -> None:
        with self.lock:
            self.values.pop(key, None)


@pytest.mark.parametrize("appends", [False, True])
def test_no_secret_is_left_in_the_store(appends):
    """Ranks share random secrets in it while a group begins. Who reads it later cannot join."""
    said: set[bytes] = set()

    def listen(key: str, value: bytes) -> bytes:
        if "tcp-card" in key:
            said.update(re.findall(rb"[0-9a-f]{64}", value))
        return value

    store = CountingStore(appends=appends, tamper=listen)
    assert group(store, secret="") == [True, True]
    assert len(said) >= 2
    left = b" ".join(store.values.values())
    assert not [secret for secret in said if secret in left]
    assert "default/met/0" in store.values  # the store itself is still there


def test_no_secret_is_left_in_a_store_that_rank_0_lends():
    options = _C.CommunicatorOptions()
    endpoint = _C.StoreEndpoint("", options)
    lent = endpoint.lend(0)

    def run(rank: int) -> None:
        found = lent if rank == 0 else _C.Store.find(endpoint.handle, 0, rank, options, SECONDS)
        with Communicator(found, rank, 2, transport="tcp", timeout=SECONDS) as c:
            c.barrier()
            assert until_gone(lent, "default/tcp-card/all from 0")
            c.barrier()

    good(on_threads(range(2), run, 30))


def until_gone(store: _C.Store, key: str) -> bool:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            store.get(key, 0.001)
        except Timeout:
            return True
    return False


def test_addresses_leave_the_store_on_nobody_s_time():
    """The store's answer, which may be far away, is not waited for."""
    answers = threading.Event()

    class FarStore(CountingStore):
        round_trip = 1e-6

        def add(self, key: str, amount: int) -> int:
            answers.wait(SECONDS)
            return super().add(key, amount)

    store = FarStore(appends=True)
    assert group(store, secret="") == [True, True]
    assert store.counts == {}
    assert "default/here/all from 0" in store.values
    answers.set()
    end = time.monotonic() + SECONDS
    while "default/tcp-card/all from 0" in store.values:
        assert time.monotonic() < end, store.values.keys()
        time.sleep(0.01)
    assert store.counts == {"default/connected": 2}


@pytest.mark.parametrize("word", [b"-1", b"99999", b"1", b"nan", b"x", b""])
def test_a_false_node_is_refused(word):
    """It would be an index into the list of nodes."""

    def tamper(key: str, value: bytes) -> bytes:
        if "/node/" not in key and b"node\x1f" not in value:
            return value
        rank = rank_of(key, value)
        text = value.partition(b":")[2]
        head, mark, rest = text.partition(b"node\x1f")
        if not mark:
            return entry(rank, word) if rank == 0 else value
        end = len(rest) - len(rest.lstrip(b"0123456789"))
        return entry(rank, head + mark + (word if rank == 0 else rest[:end]) + rest[end:])

    plain = {"transport": "auto", "secret": "", "tls": "auto", "nodes": [0, 0, 1]}
    for outcome in group(OpenStore(True, tamper), size=3, **plain):
        assert "rank 0 says that the first rank of its node is" in str(outcome)


# ------------------------------------------------------------------ the key


def test_a_short_secret_is_warned_of_once(caplog):
    waits, options = [], _C.CommunicatorOptions()
    options.secret, options.tls = SECRET, "off"

    def meanwhile(record):
        """A logger may take its time, and other threads need keys."""
        other = threading.Thread(target=_C.StoreEndpoint, args=("", options), daemon=True)
        other.start()
        other.join(SECONDS)
        waits.append(other.is_alive())
        return True

    log.logger.addFilter(meanwhile)
    for secret in ("fifteen bytes..", "fifteen bytes..", "a" * 16):
        _test.seal(secret, "g", "name", "value")
    log.logger.removeFilter(meanwhile)
    assert waits == [False]
    said = [r.getMessage() for r in caplog.records if "bytes" in r.getMessage()]
    assert len(said) == 1
    assert "the secret has 15 bytes" in said[0]
    assert "fifteen" not in said[0]
