"""The talks of a server that takes KV, one for each prompt: orders of the engine begin, continue
and end them. Used by one thread only."""

from __future__ import annotations

import asyncio

from weft.handoff.connect import Connector, Unreachable
from weft.handoff.conversation import Talk, TalkFollower
from weft.handoff.delivery import Deliveries, Delivery
from weft.handoff.greeting import Refusals, SentAway
from weft.handoff.news import News
from weft.handoff.pages import GateShut
from weft.handoff.wire import Ask, BadSpeech, DamagedPiece
from weft.memory.handoff.protocol import Missed, RoomAddress
from weft.observe.log import EventLog

log = EventLog("handoff")


class Talks:
    """`silence_s`: after this time, a silent server counts as dead."""

    def __init__(
        self,
        connector: Connector,
        follower: TalkFollower,
        deliveries: Deliveries,
        news: News,
        silence_s: float,
    ) -> None:
        self._connector = connector
        self._follower = follower
        self._deliveries = deliveries
        self._news = news
        self._silence_s = silence_s
        self._by_pull: dict[int, Talk] = {}
        self._refusals = Refusals()
        self._goodbyes: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._by_pull)

    # Orders

    def begin(self, talk: Talk) -> None:
        self._by_pull[talk.pull] = talk
        talk.task = asyncio.get_running_loop().create_task(self._run(talk))

    def order(self, pull: int, delivery: Delivery) -> None:
        talk = self._by_pull.get(pull)
        if talk is not None:
            talk.orders.add(delivery)
        else:
            self._deliveries.land(delivery)  # the connection has ended in the meantime

    def leave(self, pull: int) -> None:
        """End a conversation at once, also while the other side is silent."""
        talk = self._by_pull.get(pull)
        if talk is None:
            return
        talk.is_left = True
        if not talk.has_asked:  # otherwise the other side sees that the connection ends
            self.say_goodbye(talk.address)
        # A task that has not begun would end without a report.
        if talk.has_begun and talk.task is not None:
            talk.task.cancel()

    def break_off(self, delivery: Delivery) -> None:
        for talk in self._by_pull.values():
            if talk.delivery is delivery and talk.task is not None:
                talk.task.cancel()

    def leave_all(self, why: str) -> None:
        """End all conversations, because the weights have changed."""
        self._refusals.forget()
        for talk in self._by_pull.values():
            talk.refusal = why
            # A task that has not begun would end without a report.
            if talk.has_begun and talk.task is not None:
                talk.task.cancel()

    def say_goodbye(self, address: RoomAddress) -> None:
        task = asyncio.get_running_loop().create_task(self._connector.dismiss(address))
        self._goodbyes.add(task)
        task.add_done_callback(self._goodbyes.discard)

    # Tasks

    async def _run(self, talk: Talk) -> None:
        reason = "lost"
        why = "it was given up"
        talk.has_begun = True
        try:
            if not talk.refusal and not talk.is_left:
                await self._talk(talk)
            reason = ""
        except SentAway as exc:
            reason = "refused"
            why = f"{talk.address}: {exc}"
            self._refusals.tell(f"{talk.address}", f"{exc}")
        except DamagedPiece as exc:
            reason = "damaged"
            why = f"{talk.address}: {exc}"
        except Unreachable as exc:
            reason = "unreachable"
            why = f"{talk.address}: {exc}"
        except TimeoutError:
            why = f"{talk.address} has sent nothing for {self._silence_s:g} s"
        except (OSError, EOFError, BadSpeech) as exc:
            why = f"{talk.address}: {exc}"
        except (GateShut, asyncio.CancelledError):
            pass
        except Exception as exc:  # after any error the request computes its prompt
            log.exception("talk_failed", exc)
            why = f"{type(exc).__name__}: {exc}"
        if talk.refusal:
            reason = "refused"
            why = talk.refusal
        if talk.is_left:
            reason = ""
        del self._by_pull[talk.pull]
        while (delivery := talk.orders.take()) is not None:
            self._deliveries.land(delivery)
        if talk.delivery is not None:
            self._deliveries.land(talk.delivery)
        if reason:
            self._news.missed(Missed(talk.pull, reason, why))

    async def _talk(self, talk: Talk) -> None:
        connection = await self._connector.greeted(talk.address)
        try:
            await connection.send(Ask(talk.key.namespace, talk.key.tokens, talk.have))
            talk.has_asked = True
            await self._follower.follow(talk, connection)
        finally:
            connection.close()
