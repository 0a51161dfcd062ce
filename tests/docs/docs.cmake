# The code in README.md and docs/ is compiled and run where it stands, and the pages and the API reference are built with their links
# checked. All C++ blocks are one source that snippets.py makes at build time: most of what compiling them takes is LibTorch.
if(CMAKE_CXX_FLAGS MATCHES "-fsanitize")
  return()  # of this file: what the pages call is tested there by the modules' own tests
endif()
find_package(Python3 REQUIRED COMPONENTS Interpreter)
file(GLOB_RECURSE pages CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/docs/*.md)
set(generated ${CMAKE_CURRENT_BINARY_DIR}/docs_snippets.cpp)
add_custom_command(OUTPUT ${generated} COMMAND Python3::Interpreter ${TEST_DIR}/snippets.py cpp ${generated}
                   DEPENDS ${TEST_DIR}/snippets.py ${TEST_DIR}/preludes.hpp ${PROJECT_SOURCE_DIR}/README.md ${pages}
                   COMMENT "Extracting the code of the manual")
add_executable(docs_snippets ${generated} ${TEST_DIR}/snippets_main.cpp)
target_include_directories(docs_snippets PRIVATE ${TEST_DIR})
target_link_libraries(docs_snippets PRIVATE accelerate::models)
accelerate_use_pch(docs_snippets quick)
target_compile_options(docs_snippets PRIVATE -Wno-unused)  # a block may show a result that nobody uses
add_dependencies(docs_snippets accelerate_cli accelerate_generate accelerate_quantize accelerate_convert accelerate_merge_weights accelerate_estimate_training accelerate_agent accelerate_sagemaker)
if(ACCELERATE_EXAMPLES)
  add_dependencies(docs_snippets training_loop dry_run)
endif()
add_test(NAME docs.snippets COMMAND Python3::Interpreter ${TEST_DIR}/snippets.py run --bin ${CMAKE_RUNTIME_OUTPUT_DIRECTORY} --program $<TARGET_FILE:docs_snippets>)
set_tests_properties(docs.snippets PROPERTIES LABELS docs TIMEOUT 1800 COST 70)

# Checks what two pages say of messages and names.
add_test(NAME docs.claims COMMAND Python3::Interpreter ${TEST_DIR}/claims.py)
set_tests_properties(docs.claims PROPERTIES LABELS docs TIMEOUT 60)

# The site and the API reference; warnings and dead links are errors. Needs mkdocs, doxygen and graphviz, which scripts/test.sh installs.
add_test(NAME docs.site COMMAND ${PROJECT_SOURCE_DIR}/scripts/docs.sh ${CMAKE_CURRENT_BINARY_DIR}/docs)
set_tests_properties(docs.site PROPERTIES LABELS docs TIMEOUT 300)
