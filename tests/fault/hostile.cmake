# Some 1,600 files that nobody means well with (hostile_files.cpp makes them), through library and programs.
accelerate_test(NAME hostile_library_tests SOURCES ${TEST_DIR}/hostile_library_test.cpp ${TEST_DIR}/hostile_files.cpp LIBS accelerate_models LABELS fault COST 20)
accelerate_test(NAME hostile_programs_tests SOURCES ${TEST_DIR}/hostile_programs_test.cpp ${TEST_DIR}/hostile_files.cpp LIBS accelerate_launch LABELS fault NO_TORCH COST 20)
add_dependencies(hostile_programs_tests accelerate_cli accelerate_generate accelerate_merge_weights)
