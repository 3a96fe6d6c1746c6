#!/usr/bin/env python3
"""Event files that C++ writes, read by TensorBoard."""

import subprocess
import tempfile
import unittest
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

WRITE = Path(__file__).resolve().parent.parent.parent / "build/release/bin/write_summaries"


@unittest.skipUnless(WRITE.exists(), f"needs {WRITE}")
class Summaries(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory(prefix="paceline-test-")
        self.addCleanup(directory.cleanup)
        self.directory = directory.name

    def write(self, *arguments: int) -> None:
        subprocess.run([str(WRITE), self.directory, *map(str, arguments)], check=True, timeout=60)

    def scalars(self, tag: str) -> list[tuple[int, float]]:
        accumulator = EventAccumulator(self.directory)
        accumulator.Reload()
        self.assertEqual(set(accumulator.Tags()["scalars"]), {"loss/train", "b"})
        return [(event.step, event.value) for event in accumulator.Scalars(tag)]

    def test_are_read(self) -> None:
        self.write(0, 300)
        self.assertEqual(self.scalars("loss/train"), [(step, step / 8) for step in range(301)])
        self.assertEqual(self.scalars("b"), [(step, -step) for step in range(301)])

    def test_of_a_run_that_goes_on_replace_the_later_ones(self) -> None:
        self.write(0, 9)
        self.write(5, 12, 5)
        self.assertEqual(self.scalars("loss/train"), [(step, step / 8) for step in range(13)])

    def test_have_right_checksums(self) -> None:
        # TensorBoard's own reader checks no checksum of the data; TensorFlow's stub does.
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

        self.write(1, 2)
        (path,) = Path(self.directory).glob("events.out.tfevents.*")
        reader = PyRecordReader_New(str(path))
        for _ in range(3):
            reader.GetNext()
        with self.assertRaises(Exception):
            reader.GetNext()


if __name__ == "__main__":
    unittest.main()
