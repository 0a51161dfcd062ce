#pragma once

/// Runs the code of the manual's pages: see snippets.py, which makes a table of it.

#include <accelerate/accelerate.hpp>
#include <accelerate/bigmodel.hpp>
#include <accelerate/inference.hpp>
#include <accelerate/launch.hpp>
#include <accelerate/models/gpt2.hpp>
#include <accelerate/parallel/deepspeed_plugin.hpp>
#include <accelerate/residency.hpp>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

struct Snippet {
  std::string place;  ///< page:line
  void (*run)();
  int ranks;           ///< 1: run alone only
  bool only_compiled;  ///< not run
  std::string throws;  ///< the error that it must end in; empty: none
};

const std::vector<Snippet>& all_snippets();
