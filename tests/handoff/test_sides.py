"""Two servers over a real socket: what is lent arrives as it is, and whatever goes wrong on the way
is told."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from tests.handoff.pair import FACTS, Pair, Proxy, key_part
from tests.tiers.pool import HANG_S, PAGE_SIZE, BytesPool, key_of, pages
from weft.handoff.conversation import Talk
from weft.handoff.delivery import Delivery
from weft.handoff.facts import Facts
from weft.handoff.pages import PageGate
from weft.handoff.wire import LENGTH, MAX_SMALL_BYTES, Beat, Connection, Spoken
from weft.memory.handoff.protocol import FoundKv, Missed
from weft.memory.prefix_cache import NO_PAGES
from weft.seal import Checksummed, Seals


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as made:
        yield made


def test_what_is_lent_arrives_as_it_is_and_is_given_back(pair: Pair) -> None:
    content = pair.lend()
    pair.ask()
    assert pair.wait_for("found") == FoundKv(0, 24)
    pair.fetch(7, 0, 24)
    landed = pair.wait_for("landed")
    assert landed.ticket == 7
    assert landed.num_tokens == 24
    assert pair.content(6) == content
    assert pair.wait_for("renewed") == "r"
    pair.decode.leave(0)
    assert pair.wait_for("returned") == "r"
    assert pair.decode.report().num_bytes == 6 * BytesPool.page_bytes
    assert pair.prefill.report().num_bytes == 6 * BytesPool.page_bytes
    assert pair.decode.report().faults == pair.prefill.report().faults == 0


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_server_that_still_reads_its_weights_is_waited_for(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = getattr(pair, name)._facts
    known = facts.known
    is_asked = threading.Event()

    def find() -> Facts:
        is_asked.wait(HANG_S)
        return FACTS

    async def asked() -> Facts | str:
        is_asked.set()
        found: Facts | str = await known()
        return found

    monkeypatch.setattr(facts, "_weights", lambda: find)
    monkeypatch.setattr(facts, "known", asked)
    facts.renew()
    assert not facts.is_known
    pair.lend()
    pair.ask()
    assert pair.wait_for("found") == FoundKv(0, 24)


RESUME_STATE = np.array([20, 21], dtype=np.int32)  # places of the server that asks


def fetch_with_resume_state(pair: Pair, ticket: int, start: int, end: int) -> None:
    pair.decode.bind(ticket, 0)
    num_pages = (end - start) // PAGE_SIZE
    pair.decode.fetch(ticket, key_part(key_of(24), end), start, pages(40, num_pages), RESUME_STATE)


@pytest.mark.parametrize("start", [0, 8, 24])
def test_a_resume_state_comes_behind_its_pages_or_alone(pair: Pair, start: int) -> None:
    content, resume_state = pair.lend_with_resume_state()
    pair.ask()
    assert pair.wait_for("found") == FoundKv(0, 24)
    fetch_with_resume_state(pair, 7, start, 24)
    landed = pair.wait_for("landed")
    assert (landed.num_tokens, landed.has_resume_state) == (24 - start, True)
    num_pages = (24 - start) // PAGE_SIZE
    assert pair.content(num_pages) == content[len(content) - num_pages * BytesPool.page_bytes :]
    assert pair.resume_states[1].content(RESUME_STATE) == resume_state


def test_without_its_resume_state_a_part_has_none(pair: Pair) -> None:
    pair.lend_with_resume_state()
    pair.ask()
    pair.wait_for("found")
    pair.fetch(7, 0, 8)
    landed = pair.wait_for("landed")
    assert (landed.num_tokens, landed.has_resume_state) == (8, False)


def test_what_needs_its_resume_state_is_lent_as_a_whole_or_not_at_all(pair: Pair) -> None:
    pair.lend_with_resume_state()
    pair.decode.ask(0, pair.place(), key_part(key_of(24), 20), 0)
    missed = pair.wait_for("missed")
    assert missed.reason == "refused"
    assert "only 20 of the 24 tokens of the room are wanted" in missed.message


def test_a_resume_state_that_nobody_has_is_not_sent(pair: Pair) -> None:
    pair.lend()
    pair.ask()
    pair.wait_for("found")
    fetch_with_resume_state(pair, 7, 0, 24)
    landed = pair.wait_for("landed")
    assert not landed.has_resume_state
    assert pair.wait_for("missed").reason == "lost"


def test_a_group_that_goes_in_several_parts_has_one_checksum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.handoff.wire.PART_BYTES", 40)
    with Pair() as pair:
        content = pair.lend()
        pair.ask()
        pair.wait_for("found")
        pair.fetch(7, 0, 24)
        assert pair.wait_for("landed").num_tokens == 24
        assert pair.content(6) == content


def test_whoever_waits_for_the_rest_of_a_group_is_woken_when_all_of_it_is_there() -> None:
    content = bytes(range(200))

    async def receive(near: socket.socket, far: socket.socket) -> bytearray:
        found = bytearray(len(content))
        connection = Connection(near)
        connection.seals = Seals(Checksummed(), Checksummed())
        coming = connection.receive_pages([memoryview(found)], PageGate())
        receiving = asyncio.ensure_future(coming)
        far.sendall(content[:50])
        async with asyncio.timeout(HANG_S):
            while near.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) != 150:
                await asyncio.sleep(0.001)
            far.sendall(content[50:] + zlib.crc32(content).to_bytes(Checksummed.size, "little"))
            await receiving
        return found

    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    with near, far:
        assert asyncio.run(receive(near, far)) == content


def test_whoever_comes_first_waits_for_the_other(pair: Pair) -> None:
    pair.ask()
    pair.prefill.expect("r")
    content = pair.lend()
    assert pair.wait_for("found") == FoundKv(0, 24)
    pair.fetch(7, 8, 16)
    pair.wait_for("landed")
    pair.fetch(8, 16, 24, page=42)
    assert pair.wait_for("landed").num_tokens == 8
    assert pair.content(4) == content[2 * BytesPool.page_bytes :]


def test_only_the_common_beginning_is_found(pair: Pair) -> None:
    held = pages(5, 6)
    pair.pools[0].fill(held, 1)
    key = key_of(24)
    other = key._replace(tokens=key.tokens[:40] + b"\1\2\3\4" + key.tokens[44:])
    pair.prefill.lend("r", other, held)
    pair.ask()
    assert pair.wait_for("found") == FoundKv(0, 8)
    pair.ask(1, have=8)
    told = pair.wait_for("missed")
    assert told.pull == 1
    assert told.reason == "refused"
    assert "8 of the 24 tokens" in told.message


def test_another_namespace_shares_nothing(pair: Pair) -> None:
    pair.prefill.lend("r", key_of(24, namespace="salt"), pages(5, 6))
    pair.ask()
    assert "0 of the 24 tokens" in pair.wait_for("missed").message


def test_a_room_that_is_refused_says_why(pair: Pair) -> None:
    pair.prefill.expect("r")
    pair.ask()
    pair.prefill.refuse("r", "its request ended with abort")
    assert pair.wait_for("missed").message.endswith("its request ended with abort")
    pair.ask(1)
    assert pair.wait_for("missed").message.endswith("its request ended with abort")
    pair.lend()  # the same room again
    pair.ask(2)
    assert pair.wait_for("found").pull == 2


def test_a_lease_that_ends_is_reported(pair: Pair) -> None:
    pair.lend()
    pair.ask()
    pair.wait_for("found")
    pair.prefill.withdraw("r", "its lease was over")
    missed = pair.wait_for("missed")
    assert (missed.reason, missed.message.endswith("its lease was over")) == ("refused", True)
    pair.fetch(7, 0, 24)
    assert pair.wait_for("landed").num_tokens == 0


def test_nothing_is_written_once_a_transfer_is_cancelled(pair: Pair) -> None:
    pair.lend()
    pair.ask()
    pair.wait_for("found")
    pair.fetch(7, 0, 24)
    pair.decode.cancel(7)
    pair.pools[1].fill(pages(40, 6), 3)
    before = pair.content(6)
    pair.wait_for("landed")
    assert pair.content(6) == before
    pair.decode.leave(0)
    assert pair.wait_for("returned") == "r"


def test_a_room_that_is_not_needed_is_given_back_also_before_it_is_lent(pair: Pair) -> None:
    pair.decode.dismiss(pair.place("a"))
    pair.prefill.expect("a")
    assert pair.wait_for("returned") == "a"
    pair.lend(room="b")
    pair.decode.dismiss(pair.place("b"))
    assert pair.wait_for("returned") == "b"


def test_nobody_listens_there(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pair.ask(port=port)
    assert pair.wait_for("missed")[:2] == (0, "unreachable")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (FACTS | {"page size": "32"}, "the page size is 4 there, and 32 here"),
        (FACTS | {"digest of the weights": "x"}, "the digest of the weights is abc there"),
        ({"page size": "4"}, "the digest of the weights is abc there, and not known here"),
    ],
)
def test_another_layout_or_model_is_refused_by_name(facts: dict[str, str], words: str) -> None:
    with Pair(facts=facts) as pair:
        pair.lend()
        pair.ask()
        missed = pair.wait_for("missed")
        assert missed.reason == "refused"
        assert words in missed.message


@pytest.mark.parametrize("secrets", [("a", "b"), ("", "b"), ("a", "")])
def test_another_secret_is_refused(secrets: tuple[str, str]) -> None:
    with Pair(secrets=secrets) as pair:
        pair.lend()
        pair.ask()
        missed = pair.wait_for("missed")
        assert missed.reason == "refused"
        assert "--handoff-secret" in missed.message


def test_one_secret_is_enough_for_both() -> None:
    with Pair(secrets=("s", "s")) as pair:
        pair.lend()
        pair.ask()
        pair.wait_for("found")


def test_without_a_secret_nobody_asks_another_machine(pair: Pair) -> None:
    pair.decode.ask(0, pair.place()._replace(host="192.0.2.1"), key_of(24), 0)
    assert "another machine" in pair.wait_for("missed").message


def test_a_room_that_nobody_has_heard_of_is_refused() -> None:
    with Pair(room_s=0.0) as pair:
        pair.ask(room="other")
        assert "no request of the room other has come" in pair.wait_for("missed").message


OTHER = FACTS | {"digest of the weights": "def"}


def test_with_new_weights_on_one_side_both_refuse_and_with_the_same_on_both_they_go_on(
    pair: Pair,
) -> None:
    pair.facts[0] = OTHER
    pair.prefill.renew("the weights were changed")
    pair.wait_until(pair.knows_its_facts)
    pair.lend()
    pair.ask()
    missed = pair.wait_for("missed")
    assert missed.message.endswith("the digest of the weights is def there, and abc here")
    pair.facts[1] = OTHER
    pair.decode.renew("the weights were changed")
    pair.wait_until(pair.knows_its_facts)
    pair.ask(1)
    assert pair.wait_for("found").pull == 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_whoever_waits_when_the_weights_change_gets_nothing_and_hears_why(
    pair: Pair, side: str
) -> None:
    pair.prefill.expect("r")
    pair.ask()
    pair.wait_until(lambda: any(room.num_askers for room in pair.prefill._rooms.by_name.values()))
    getattr(pair, side).renew("the weights were changed")
    missed = pair.wait_for("missed")
    where = "there" if side == "prefill" else "here"
    assert missed.reason == "refused"
    assert missed.message.endswith(f"the weights were changed {where}")
    assert pair.wait_for("returned") == "r"


def test_what_is_asked_when_the_weights_change_is_answered_though_nothing_has_begun(
    pair: Pair,
) -> None:
    def ask_and_renew() -> None:
        pair.decode._talks.begin(Talk(0, pair.place(), key_of(24), 0))
        pair.decode._talks.leave_all("the weights were changed here")

    pair.lend()
    pair.decode._thread.soon(ask_and_renew)
    assert pair.wait_for("missed") == Missed(0, "refused", "the weights were changed here")


def test_what_was_found_before_the_weights_were_changed_is_not_fetched(pair: Pair) -> None:
    pair.lend()
    pair.ask()
    pair.wait_for("found")
    pair.decode.renew("the weights were changed")
    pair.fetch(7, 0, 24)
    assert pair.wait_for("landed").num_tokens == 0
    assert pair.wait_for("missed").reason == "refused"


@pytest.mark.parametrize("turns", range(8))
def test_every_fetch_lands_at_whatever_moment_its_conversation_ends(pair: Pair, turns: int) -> None:
    """`turns`: of the loop, between the order and the end."""

    async def order_and_end() -> None:
        delivery = Delivery(7, 0, 24, pages(40, 6), NO_PAGES, 0.0)
        pair.decode._talks.order(0, delivery)
        for _ in range(turns):
            await asyncio.sleep(0)
        pair.decode._talks.leave_all("the weights were changed here")

    pair.lend()
    pair.ask()
    pair.wait_for("found")
    loop = pair.decode._thread.loop
    asyncio.run_coroutine_threadsafe(order_and_end(), loop).result(HANG_S)
    assert pair.wait_for("landed").ticket == 7
    assert pair.wait_for("missed").reason == "refused"


def test_no_task_is_left_of_a_conversation_that_has_ended(pair: Pair) -> None:
    pair.lend()
    pair.ask()
    pair.wait_for("found")
    pair.fetch(7, 0, 24)
    pair.wait_for("landed")
    pair.decode.leave(0)
    assert pair.wait_for("returned") == "r"
    pair.wait_until(lambda: not asyncio.all_tasks(pair.decode._thread.loop))


def test_new_weights_leave_a_room_that_nobody_has_asked_for_to_the_engine(pair: Pair) -> None:
    pair.lend()
    pair.prefill.renew("the weights were changed")
    pair.wait_until(pair.knows_its_facts)
    pair.ask()
    assert pair.wait_for("found") == FoundKv(0, 24)
    assert not pair.news["returned"]


def test_a_sign_of_life_is_sent_when_something_has_happened_or_a_beat_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Spoken] = []
    send = Connection.send

    async def note(connection: Connection, message: Spoken) -> None:
        sent.append(message)
        await send(connection, message)

    monkeypatch.setattr(Connection, "send", note)
    with Pair(beat_s=2 * HANG_S) as pair:
        pair.ask()
        pair.wait_until(
            lambda: any(room.num_askers for room in pair.prefill._rooms.by_name.values())
        )
        pair.prefill.expect("r")
        pair.lend()
        pair.wait_for("found")
        for ticket in range(3):
            pair.fetch(ticket, 0, 24)
            pair.wait_for("landed")
    assert sum(isinstance(message, Beat) for message in sent) <= 2  # it was expected, and lent


def test_one_wrong_bit_is_noticed(pair: Pair) -> None:
    content = pair.lend()

    def flip(passed: bytes) -> bytes:
        at = passed.find(content[-8:])
        if at < 0:
            return passed
        return passed[:at] + bytes([passed[at] ^ 1]) + passed[at + 1 :]

    proxy = Proxy(pair.port, flip)
    pair.ask(port=proxy.port)
    pair.wait_for("found")
    pair.fetch(7, 0, 24)
    assert pair.wait_for("landed").num_tokens == 0
    assert pair.wait_for("missed").reason == "damaged"
    proxy.close()


@pytest.mark.parametrize("num_bytes", [0, 10, 100, 200, 330])
def test_a_server_that_hangs_is_noticed_by_its_silence(num_bytes: int) -> None:
    with Pair(silence_s=0.3) as pair:
        pair.lend()
        passed = 0

        def hang(content: bytes) -> bytes | None:
            nonlocal passed
            passed += len(content)
            return content if passed <= num_bytes else None

        proxy = Proxy(pair.port, hang)
        pair.ask(port=proxy.port)
        pair.decode.bind(7, 0)
        pair.decode.fetch(7, key_of(24), 0, pages(40, 6))
        assert pair.wait_for("missed").reason == "lost"
        assert pair.wait_for("landed").num_tokens == 0
        proxy.close()


def test_rubbish_harms_nobody(pair: Pair) -> None:
    for rubbish in (
        b"GET / HTTP/1.1\r\n\r\n",
        LENGTH.pack(MAX_SMALL_BYTES + 1),
        LENGTH.pack(3) + b"\xc1ab",
    ):
        with socket.create_connection(("127.0.0.1", pair.port)) as client:
            client.sendall(rubbish)
            with suppress(ConnectionResetError):
                while client.recv(1 << 16):
                    pass
    assert pair.prefill.report().faults == 3
    pair.lend()
    pair.ask()
    pair.wait_for("found")


def test_a_prefill_server_that_dies_and_comes_back_is_asked_again() -> None:
    first = Pair()
    first.lend()
    first.ask()
    first.wait_for("found")
    first.prefill.close()
    assert first.wait_for("missed") == Missed(
        0, "lost", f"127.0.0.1:{first.port}: the connection was closed"
    )
    with Pair() as second:
        content = second.lend()
        first.ask(1, port=second.port)
        first.wait_for("found")
        first.fetch(9, 0, 24, pull=1)
        first.wait_for("landed")
        assert first.content(6) == content
    first.decode.close()


def test_a_decode_server_that_dies_gives_back_what_it_has_asked_for(pair: Pair) -> None:
    pair.lend()
    pair.ask()
    pair.wait_for("found")
    pair.decode.close()
    assert pair.wait_for("returned") == "r"


def test_key_parts_are_whole_pages() -> None:
    assert len(key_part(key_of(24), 8).tokens) == 8 * PAGE_SIZE


def test_an_error_that_nobody_waits_for_any_more_is_no_news() -> None:
    told: list[object] = []

    async def end_while_nobody_listens() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            far = socket.create_connection(listener.getsockname())
            near, _ = listener.accept()
        coming = Connection(near).next_message()
        far.close()
        await asyncio.wait({coming})
        near.close()

    asyncio.run(end_while_nobody_listens())
    gc.collect()
    assert not told
