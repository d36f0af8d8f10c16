"""Somebody else on the way, or in the place of the other server: nothing that was not lent is ever
taken, nothing is sent that was not shown to be known, and what goes wrong is told in one line."""

from __future__ import annotations

import logging
import random
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from tests.handoff.pair import FACTS, Pair, Proxy, key_part
from tests.handoff.peer import Peer, RogueLender
from tests.tiers.pool import HANG_S, PAGE_SIZE, BytesPool, key_of, pages
from weft.handoff import greeting, reception
from weft.handoff.wire import (
    LENGTH,
    MAX_WHY_LEN,
    VERSION,
    Ask,
    Beat,
    Challenge,
    Decline,
    Hello,
    PageGroup,
    Ready,
    Spoken,
    Wanted,
    Welcome,
)
from weft.memory.prefix_cache import TOKEN_BYTES
from weft.observe.log import EventLog
from weft.seal import Seals

SECRET = "a secret of both"
KEY = key_of(24)
PAGE_BYTES = BytesPool.page_bytes
NESTED = b"\x91" * 60_000 + b"\x90"  # arrays in arrays


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as made:
        yield made


@pytest.fixture
def sealed() -> Iterator[Pair]:
    with Pair(secrets=(SECRET, SECRET)) as made:
        yield made


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


# ---- on the way


class Wire(Proxy):
    """Passes on in both directions what `spoil` makes of each piece, after the greeting."""

    def __init__(self, port: int, spoil: Callable[[bytes, bool], bytes]) -> None:
        self._change = spoil
        super().__init__(port, lambda said: said)

    def _serve(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        far = socket.create_connection(("127.0.0.1", self._to))
        self._sockets += [near, far]
        with Peer(far) as lender, Peer(near) as client:
            try:
                for source, sink in ((lender, client), (client, lender), (lender, client)):
                    head = source.read(LENGTH.size)
                    sink.sock.sendall(head + source.read(LENGTH.unpack(head)[0]))
            except (OSError, EOFError):
                return
            back = threading.Thread(
                target=self._pass, args=(near, far, lambda said: self._change(said, False))
            )
            back.start()
            self._pass(far, near, lambda said: self._change(said, True))
            back.join(HANG_S)


def spoilt(said: bytes, rng: random.Random) -> bytes:
    """A piece with one thing changed."""
    at = rng.randrange(len(said))
    end = rng.randrange(at, len(said)) + 1
    match rng.randrange(5):
        case 0:
            return said[:at] + bytes([said[at] ^ 1 << rng.randrange(8)]) + said[at + 1 :]
        case 1:
            return said[:at] + said[end:]
        case 2:
            return said[:end] + said[at:end] + said[end:]
        case 3:
            return said[:at] + rng.randbytes(end - at) + said[end:]
    return said[:at]


@pytest.mark.parametrize("secret", ["", SECRET])
@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_changed_on_the_way_nothing_arrives_that_was_not_lent(
    seed: int, secret: str
) -> None:
    rng = random.Random(f"{seed} {secret}")
    from_lender = rng.random() < 0.7
    number = rng.randrange(6)  # of the piece that is changed

    def spoil(said: bytes, is_of_lender: bool) -> bytes:
        nonlocal number
        if is_of_lender is not from_lender:
            return said
        number -= 1
        return spoilt(said, rng) if number == -1 else said

    with Pair(secrets=(secret, secret), silence_s=0.5) as pair:
        content = pair.lend()
        wire = Wire(pair.port, spoil)
        pair.ask(port=wire.port)
        pair.wait_until(lambda: pair._take() or pair.news["found"] or pair.news["missed"])
        pair.fetch(7, 0, 24)
        landed = pair.wait_for("landed")
        num_pages = landed.num_tokens // PAGE_SIZE
        assert pair.content(num_pages) == content[: num_pages * PAGE_BYTES]
        if num_pages < 6:
            pair.wait_for("missed")
        wire.close()


@pytest.mark.parametrize("knows", ["checksums", "the protocol"])
def test_whoever_only_passes_the_greeting_on_can_say_nothing_afterwards(
    sealed: Pair, knows: str
) -> None:
    """The lender's own Challenge and Welcome reach the other side, which then gets K and V of
    somebody else."""
    sealed.lend()

    def act(victim: Peer) -> None:
        with Peer.asking(sealed.port) as lender:
            for source, sink in ((lender, victim), (victim, lender), (lender, victim)):
                head = source.read(LENGTH.size)
                sink.sock.sendall(head + source.read(LENGTH.unpack(head)[0]))
        if knows == "checksums":
            victim.seals = greeting_without_secret()
        victim.sock.recv(1 << 16)  # what is asked for
        victim.say(Ready(24))
        victim.say(PageGroup(6, 6 * PAGE_BYTES))
        victim.send(b"\xee" * 6 * PAGE_BYTES)
        victim.is_over()

    with RogueLender(act) as rogue:
        sealed.ask(port=rogue.port)
        sealed.fetch(7, 0, 24)
        assert sealed.wait_for("missed").reason == "damaged"
        assert sealed.wait_for("landed").num_tokens == 0
        assert not sealed.news["found"]


def greeting_without_secret() -> Seals:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with Peer(near) as client, Peer(far) as lender:
        asking = threading.Thread(target=client.greet)
        asking.start()
        lender.welcome()
        asking.join(HANG_S)
        return lender.seals


@pytest.mark.parametrize("what", ["repeat", "leave out", "swap", "send back"])
def test_messages_have_one_place_and_one_direction(what: str) -> None:
    """Between two sides with one key, each message counts once, in its turn, and not for its
    sender."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with Peer(near) as client, Peer(far) as lender:
        asking = threading.Thread(target=client.greet, args=(SECRET,))
        asking.start()
        lender.welcome(SECRET)
        asking.join(HANG_S)
        first = marked(lender, Ready(8))
        second = marked(lender, Ready(16))
        match what:
            case "repeat":
                client_hears(lender, client, first)
                wrong = first
            case "leave out":
                wrong = second
            case "swap":
                wrong = second + first
            case "send back":
                client.seals = client.seals._replace(receiving=client.seals.sending)
                wrong = first
        lender.sock.sendall(wrong)
        with pytest.raises(AssertionError):
            client.hear()


def marked(peer: Peer, message: Spoken) -> bytes:
    """A message as it is sent, with its mark."""
    body = msgspec.msgpack.encode(message)
    content = LENGTH.pack(len(body)) + body
    mark = peer.seals.sending.begin()
    mark.add(content)
    return content + mark.end()


def client_hears(lender: Peer, client: Peer, content: bytes) -> None:
    lender.sock.sendall(content)
    assert isinstance(client.hear(), Ready)


def test_proofs_and_keys_belong_to_one_secret_greeting_direction_address_and_room() -> None:
    hello = Hello(b"n" * 32, b"", {"a": "b"}, "h:1", "r")

    def all_of(secret: str, nonce: bytes, hello: Hello) -> list[bytes]:
        keys = greeting.GreetingKeys(secret, nonce, hello)
        seals = keys.from_decode.begin().end(), keys.from_prefill.begin().end()
        return [keys.proof_of_decode, keys.proof_of_prefill, *seals]

    changed = [
        msgspec.structs.replace(hello, **change)
        for change in (
            {"nonce": b"m" * 32},
            {"facts": {"a": "c"}},
            {"facts": {"ab": ""}},
            {"address": "h:11"},
            {"address": "h", "room": ":1r"},
            {"room": "s"},
        )
    ]
    found = all_of(SECRET, b"o" * 32, hello)
    found += all_of("another", b"o" * 32, hello)
    found += all_of(SECRET, b"p" * 32, hello)
    for other in changed:
        found += all_of(SECRET, b"o" * 32, other)
    assert len(set(found)) == len(found) == 4 * 9
    # The proof itself is no part of what is proved.
    assert all_of(SECRET, b"o" * 32, msgspec.structs.replace(hello, proof=b"x")) == found[:4]


# ---- in the place of a prefill server


@pytest.mark.parametrize("proof", [b"", b"x" * 32])
def test_a_lender_that_does_not_know_the_secret_is_refused(sealed: Pair, proof: bytes) -> None:
    def act(peer: Peer) -> None:
        peer.say(Challenge(VERSION, b"n" * 32))
        peer.hear()
        peer.say(Welcome(proof))
        peer.say(Ready(24))
        peer.is_over()

    with RogueLender(act) as rogue:
        sealed.ask(port=rogue.port)
        missed = sealed.wait_for("missed")
        assert missed.reason == "refused"
        assert "--handoff-secret" in missed.message
        assert not sealed.news["found"]


def test_a_lender_that_sends_back_the_proof_of_the_other_side_is_refused(sealed: Pair) -> None:
    def act(peer: Peer) -> None:
        peer.say(Challenge(VERSION, b"n" * 32))
        peer.say(Welcome(peer.hear().proof))
        peer.is_over()

    with RogueLender(act) as rogue:
        sealed.ask(port=rogue.port)
        assert sealed.wait_for("missed").reason == "refused"


@pytest.mark.parametrize("nonce", [b"", b"n" * 31, b"n" * 33])
def test_a_challenge_without_a_whole_nonce_is_not_answered(sealed: Pair, nonce: bytes) -> None:
    answers: list[bytes] = []

    def act(peer: Peer) -> None:
        peer.say(Challenge(VERSION, nonce))
        answers.append(peer.sock.recv(1))

    with RogueLender(act) as rogue:
        sealed.ask(port=rogue.port)
        assert sealed.wait_for("missed").reason == "lost"
    assert answers == [b""]


@pytest.mark.parametrize("version", [0, 1, VERSION - 1, VERSION + 1])
def test_nobody_is_talked_into_another_version(sealed: Pair, version: int) -> None:
    def act(peer: Peer) -> None:
        peer.say(Challenge(version, b"n" * 32))
        assert isinstance(peer.hear(), Decline)
        peer.is_over()

    with RogueLender(act) as rogue:
        sealed.ask(port=rogue.port)
        assert f"version {version} there" in sealed.wait_for("missed").message


@pytest.mark.parametrize(
    "said",
    [
        [Ready(25)],
        [Ready(28)],
        [Ready(23)],
        [Ready(0)],
        [Ready(-4)],
        [Ready(2**63 - 1)],
        [Ready(8), Ready(16)],
        [Ready(8), Ready(8)],
        [Wanted(0, 4)],
        [PageGroup(6, 6 * PAGE_BYTES)],
        [Challenge(VERSION, b"n" * 32)],
        [NESTED],
        [b"\xc1"],
    ],
)
def test_a_lender_says_no_more_than_it_may(
    pair: Pair, said: list[Spoken | bytes], caplog: pytest.LogCaptureFixture
) -> None:
    def act(peer: Peer) -> None:
        peer.welcome()
        peer.hear()
        for message in said:
            peer.say(message)
        peer.is_over()

    with RogueLender(act) as rogue:
        pair.ask(port=rogue.port)
        missed = pair.wait_for("missed")
    assert missed.reason == "lost"
    assert len(missed.message) < 1_000
    assert len(pair.news["found"]) == len(said) - 1
    assert not lines(caplog)  # the engine tells of it


@pytest.mark.parametrize(
    "said",
    [
        [PageGroup(0, 0)],
        [PageGroup(-1, -PAGE_BYTES)],
        [PageGroup(6, 6 * PAGE_BYTES - 1)],
        [PageGroup(7, 7 * PAGE_BYTES)],
        [PageGroup(2**62, 2**62)],
        [PageGroup(2, 2 * PAGE_BYTES, True)],
        [PageGroup(0, 0, True)],
        [Ready(24)],
        [Ask("", b"", 0)],
        [NESTED],
    ],
)
def test_a_lender_sends_no_more_than_is_wanted(pair: Pair, said: list[Spoken | bytes]) -> None:
    def act(peer: Peer) -> None:
        peer.welcome()
        peer.hear()
        peer.say(Ready(24))
        while not isinstance(peer.hear(), Wanted):
            pass
        for message in said:
            peer.say(message)
        peer.is_over()

    before = pair.pools[1].content(pages(0, 64))
    with RogueLender(act) as rogue:
        pair.ask(port=rogue.port)
        pair.wait_for("found")
        pair.fetch(7, 0, 24)
        assert pair.wait_for("landed").num_tokens == 0
        assert pair.wait_for("missed").reason == "lost"
    assert pair.pools[1].content(pages(0, 64)) == before


def test_beats_are_no_pages() -> None:
    def act(peer: Peer) -> None:
        peer.welcome()
        peer.hear()
        peer.say(Ready(24))
        pause = threading.Event()
        while not pause.wait(0.01):
            peer.say(Beat())

    with Pair(silence_s=0.3) as pair, RogueLender(act) as rogue:
        pair.ask(port=rogue.port)
        pair.wait_for("found")
        pair.fetch(7, 0, 24)
        assert pair.wait_for("landed").num_tokens == 0
        assert pair.wait_for("missed").reason == "lost"


@pytest.mark.parametrize("when", ["greeting", "waiting", "transfer"])
def test_the_words_of_a_lender_are_bounded_and_printable(pair: Pair, when: str) -> None:
    def act(peer: Peer) -> None:
        told = Decline("\x1b[31m\n" + "x" * 60_000)
        if when == "greeting":
            peer.say(Challenge(VERSION, b"n" * 32))
            peer.hear()
            peer.say(told)
            return
        peer.welcome()
        peer.hear()
        if when == "transfer":
            peer.say(Ready(24))
            while not isinstance(peer.hear(), Wanted):
                pass
        peer.say(told)
        peer.is_over()

    with RogueLender(act) as rogue:
        pair.ask(port=rogue.port)
        if when == "transfer":
            pair.wait_for("found")
            pair.fetch(7, 0, 24)
        missed = pair.wait_for("missed")
    assert missed.reason == "refused"
    assert missed.message.isprintable()
    assert len(missed.message) < MAX_WHY_LEN + 100


@pytest.mark.parametrize("when", ["greeting", "waiting", "pages"])
def test_a_lender_that_drips_is_left(when: str) -> None:
    def act(peer: Peer) -> None:
        pause = threading.Event()
        content = LENGTH.pack(60_000) + bytes(60_000)
        if when != "greeting":
            peer.welcome()
            peer.hear()
        if when == "pages":
            peer.say(Ready(24))
            while not isinstance(peer.hear(), Wanted):
                pass
            peer.say(PageGroup(6, 6 * PAGE_BYTES))
            content = bytes(6 * PAGE_BYTES)
        for number in range(len(content)):
            peer.sock.sendall(content[number : number + 1])
            pause.wait(0.02)

    with Pair(silence_s=0.3) as pair, RogueLender(act) as rogue:
        pair.ask(port=rogue.port)
        if when == "pages":
            pair.wait_for("found")
        pair.fetch(7, 0, 24)
        assert pair.wait_for("landed").num_tokens == 0
        missed = pair.wait_for("missed")
        assert missed.reason == "lost"
        assert "has sent nothing" in missed.message


def test_whoever_leaves_a_silent_server_is_free_at_once() -> None:
    with Pair(silence_s=HANG_S) as pair:
        asked = threading.Event()

        def act(peer: Peer) -> None:
            asked.set()
            peer.is_over()

        with RogueLender(act) as rogue:
            pair.ask(port=rogue.port)
            assert asked.wait(HANG_S)
            pair.decode.bind(7, 0)
            pair.decode.fetch(7, KEY, 0, pages(40, 6))
            pair.decode.leave(0)
            assert pair.wait_for("landed").num_tokens == 0
            pair.wait_until(lambda: not pair.decode._talks)
            assert not pair.news["missed"]
            assert pair.decode.report().faults == 0
            pair.decode.close()  # also of the goodbye


def test_a_room_that_was_left_before_it_was_asked_for_is_given_back(pair: Pair) -> None:
    pair.lend()
    gone = threading.Event()

    def leave(said: bytes) -> bytes:
        if not gone.is_set():
            gone.set()
            pair.decode.leave(0)
            pair.wait_until(lambda: not pair.decode._talks)
        return said

    proxy = Proxy(pair.port, leave)
    pair.ask(port=proxy.port)
    assert pair.wait_for("returned") == "r"
    proxy.close()


def test_a_name_that_cannot_be_looked_up_is_unreachable(pair: Pair) -> None:
    for host in ("a..b", "a" * 64 + ".b", ".", "\ud83d"):
        pair.decode.ask(0, pair.place()._replace(host=host), KEY, 0)
        assert pair.wait_for("missed").reason == "unreachable"


# ---- in the place of a decode server


def test_rubbish_before_the_secret_is_one_line(
    sealed: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "log", EventLog("handoff"))  # that has written nothing yet
    told: list[object] = []
    loop = sealed.prefill._thread.loop
    loop.call_soon_threadsafe(
        loop.set_exception_handler, lambda loop, context: told.append(context)
    )
    rubbish = [
        NESTED,
        b"\x81\xa4type" + NESTED,
        b"\xc1" * 60_000,
        b"\x81\xa4type\xda\xea\x60" + b"x" * 60_000,
    ]
    for _ in range(3):
        for body in rubbish:
            with Peer.asking(sealed.port) as peer:
                peer.hear()
                peer.say(body)
                assert peer.is_over()
    assert sealed.prefill.report().faults == 3 * len(rubbish)
    (line,) = lines(caplog)
    assert line.exc_info is None
    assert len(str(line.__dict__["fields"])) < 600
    assert not told


@pytest.mark.parametrize("nonce", [b"", b"n", b"n" * 31, b"n" * 64])
def test_a_greeting_without_a_whole_nonce_is_none(sealed: Pair, nonce: bytes) -> None:
    with Peer.asking(sealed.port) as peer:
        challenge = peer.hear()
        hello = Hello(nonce, b"", FACTS, "h:1", "r")
        keys = greeting.GreetingKeys(SECRET, challenge.nonce, hello)
        peer.say(msgspec.structs.replace(hello, proof=keys.proof_of_decode))
        with pytest.raises(EOFError):
            peer.hear()


def test_a_proof_that_was_heard_is_of_no_use_later(sealed: Pair) -> None:
    sealed.lend()
    heard: list[Hello] = []

    def listen(peer: Peer) -> None:
        peer.say(Challenge(VERSION, b"n" * 32))
        heard.append(peer.hear())

    with RogueLender(listen) as rogue:
        sealed.ask(port=rogue.port)
        sealed.wait_for("missed")
    with Peer.asking(sealed.port) as peer:
        peer.hear()
        peer.say(heard[0])
        assert isinstance(peer.hear(), Decline)


def next_of(peer: Peer) -> object:
    """What the other side says next; None: it has ended the connection."""
    try:
        message = peer.hear()
        while isinstance(message, Beat):
            message = peer.hear()
    except (EOFError, ConnectionResetError):
        return None
    return message


@pytest.mark.parametrize("secret", ["", SECRET])
def test_only_pages_of_tokens_that_were_shown_are_sent(secret: str) -> None:
    """Whoever knows the beginning of a prompt gets K and V of that beginning, and of nothing behind
    it."""
    rng = random.Random(3)
    with Pair(secrets=(secret, secret)) as pair:
        content = pair.lend()
        for shown in range(0, 28, 4):
            for _ in range(12):
                start, end = (rng.randrange(-4, 32) for _ in range(2))
                if rng.random() < 0.5:
                    start, end = start // 4 * 4, end // 4 * 4
                key = key_part(KEY, shown)
                if shown > 24:
                    key = key_of(24)._replace(tokens=KEY.tokens + b"\1\2\3\4" * 4)
                with Peer.asking(pair.port) as peer:
                    peer.greet(secret)
                    peer.say(Ask(key.namespace, key.tokens, 0))
                    known = min(shown, 24)
                    answer = peer.hear()
                    if not known:
                        assert isinstance(answer, Decline)
                        continue
                    assert answer == Ready(known)
                    peer.say(Wanted(start, end))
                    may = start % 4 == 0 and 0 <= start <= end <= known
                    if not may:
                        assert next_of(peer) is None
                        continue
                    num_pages = -(-(end - start) // 4)
                    if not num_pages:
                        continue
                    group = next_of(peer)
                    assert group == PageGroup(num_pages, num_pages * PAGE_BYTES)
                    first = start // 4 * PAGE_BYTES
                    sent = peer.hear_pages(group.num_bytes)
                    assert sent == content[first : first + group.num_bytes]


def test_connections_that_do_not_greet_are_bounded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "MAX_STRANGERS", 4)
    pair.lend()
    strangers = [Peer.asking(pair.port) for _ in range(4)]
    for stranger in strangers:
        stranger.hear()
    with Peer.asking(pair.port) as late:
        assert late.is_over()
    for stranger in strangers:
        stranger.sock.close()
    pair.wait_until(lambda: not pair.prefill._reception.num_strangers)
    pair.ask()
    pair.wait_for("found")


def test_whoever_has_greeted_is_no_stranger(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "MAX_STRANGERS", 1)
    peers = []
    for _ in range(5):
        peer = Peer.asking(pair.port)
        assert isinstance(peer.greet(), Welcome)
        peers.append(peer)
    for peer in peers:
        peer.sock.close()


def test_whoever_drips_its_greeting_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "GREETING_S", 0.2)
    with Pair(secrets=(SECRET, SECRET)) as pair, Peer.asking(pair.port) as peer:
        peer.hear()
        peer.sock.sendall(LENGTH.pack(60_000)[:2])
        assert peer.is_over()


def test_a_prompt_in_bytes_that_are_no_tokens_harms_nobody(pair: Pair) -> None:
    pair.lend()
    for tokens in (b"", b"\0", KEY.tokens[:17], KEY.tokens + b"\0" * 3):
        with Peer.asking(pair.port) as peer:
            peer.greet()
            peer.say(Ask("", tokens, -(2**62)))
            answer = peer.hear()
            num_known = min(len(tokens) // TOKEN_BYTES, 24) // 4 * 4
            assert answer == Ready(num_known)
