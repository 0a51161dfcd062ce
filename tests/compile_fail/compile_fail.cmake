# Sources that must not compile, and what the compiler is to say: check.py. Only parsed, with narrow headers, so that none needs a precompiled one.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME compile_fail
  COMMAND Python3::Interpreter ${TEST_DIR}/check.py ${TEST_DIR}/models.cpp ${TEST_DIR}/batches.cpp ${TEST_DIR}/objects.cpp -- ${CMAKE_CXX_COMPILER} -std=c++20
          "-I$<JOIN:$<TARGET_PROPERTY:accelerate,INTERFACE_INCLUDE_DIRECTORIES>,;-I>" "-isystem$<JOIN:$<TARGET_PROPERTY:torch,INTERFACE_INCLUDE_DIRECTORIES>,;-isystem>"
  COMMAND_EXPAND_LISTS)
set_tests_properties(compile_fail PROPERTIES TIMEOUT 600 LABELS compile_fail COST 20)
