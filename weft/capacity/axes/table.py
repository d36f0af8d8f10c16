"""All axes, in the order in which they are searched: the first ones change the most."""

from __future__ import annotations

from weft.capacity.axes.admission import ADMISSION
from weft.capacity.axes.axis import Axis
from weft.capacity.axes.chunk import CHUNK
from weft.capacity.axes.guesses import GUESSES
from weft.capacity.axes.mixed import MIXED
from weft.capacity.axes.policy import POLICY
from weft.capacity.axes.rows import ROWS
from weft.capacity.axes.slowdown import SLOWDOWN

AXES: tuple[Axis, ...] = (SLOWDOWN, CHUNK, ROWS, MIXED, POLICY, GUESSES, ADMISSION)
