"""Faults of the columns layer."""
from faults import F

F("ColumnsPlugin::size", "src/parallel/columns/columns.cpp", "return std::make_unique<ChosenColumns>(*plugin, «size»);", "1",
  "columns_tests Columns.TrainAsOneProcess")
