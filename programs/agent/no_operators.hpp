#pragma once

namespace accelerate::agent {

/// Gives back the pages of program code and constants that loading the libraries has touched, 45 MB of them. Those that
/// are needed again are mapped again from the files.
void drop_pages_of_loading();

}  // namespace accelerate::agent
