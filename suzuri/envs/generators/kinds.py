"""The kinds of tasks by name. Nothing registers itself: this table is all there is."""

from collections.abc import Mapping

from suzuri.envs.generators import (
    arithmetic,
    conversations,
    json_answers,
    knowledge,
    pictures,
    small_talk,
    sounds,
    stories,
    strings,
    tool_use,
)
from suzuri.envs.task import Generator

KINDS: dict[str, Generator] = {
    "arithmetic": arithmetic.make,
    "strings": strings.make,
    "stories": stories.make,
    "tools": tool_use.make,
    "json": json_answers.make,
    "small_talk": small_talk.make,
    "knowledge": knowledge.make,
    "conversations": conversations.make,
    "pictures": pictures.make,
    "sounds": sounds.make,
}
VARIANTS: dict[str, Mapping[str, float]] = {
    "arithmetic": arithmetic.VARIANTS,
    "strings": strings.VARIANTS,
    "stories": stories.VARIANTS,
    "tools": tool_use.VARIANTS,
    "json": json_answers.VARIANTS,
    "small_talk": small_talk.VARIANTS,
    "knowledge": knowledge.VARIANTS,
    "conversations": conversations.VARIANTS,
    "pictures": pictures.VARIANTS,
    "sounds": sounds.VARIANTS,
}
