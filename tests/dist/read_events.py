"""Prints every scalar of a TensorBoard run: read_events.py FOLDER -> lines `tag step value`."""
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(sys.argv[1])
events.Reload()
for tag in sorted(events.Tags()["scalars"]):
    for event in events.Scalars(tag):
        print(tag, event.step, event.value)
