# Sources that must not compile, and what the compiler is to say: check.py. Only parsed, with narrow headers, so that none needs a precompiled one.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
foreach(about models batches objects)
  add_test(NAME compile_fail.${about}
    COMMAND Python3::Interpreter ${TEST_DIR}/check.py ${TEST_DIR}/${about}.cpp -- ${CMAKE_CXX_COMPILER} -std=c++20
            "-I$<JOIN:$<TARGET_PROPERTY:accelerate,INTERFACE_INCLUDE_DIRECTORIES>,;-I>" "-isystem$<JOIN:$<TARGET_PROPERTY:torch,INTERFACE_INCLUDE_DIRECTORIES>,;-isystem>"
    COMMAND_EXPAND_LISTS)
  set_tests_properties(compile_fail.${about} PROPERTIES TIMEOUT 180 LABELS compile_fail)
endforeach()
