"""How large the elements of each type are, for schedules, which know no native code."""

from __future__ import annotations

from pycollective import _core
from pycollective.schedule.cost import Element

# By the type's name, in the core's order.
ELEMENTS: dict[str, Element] = {
    each.name: Element(each.size, each.accumulator) for each in _core.dtypes()
}
