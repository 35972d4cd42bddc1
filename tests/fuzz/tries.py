"""The kinds of tries: something valid is damaged or disturbed, and must be refused with a sentence or give the same."""

import random
from collections.abc import Callable

import inputs
import surroundings
from workshop import Workshop

TRIES: dict[str, Callable[[Workshop, random.Random], bool]] = {
    "relation files": inputs.relation_file,
    "task files": inputs.task_file,
    "text files": inputs.text_file,
    "checkpoint folders": inputs.checkpoint_folder,
    "result files": inputs.result_file,
    "run folders": inputs.run_folder,
    "reproductions": inputs.reproduction_folder,
    "caches": inputs.cache_file,
    "context vectors": inputs.vectors_folder,
    "command lines": inputs.command_line,
    "pages": surroundings.page,
    "vocabularies": surroundings.vocabulary,
    "kills": surroundings.kill,
    "full disks": surroundings.full_disk,
}
