#pragma once

namespace accelerate {

/// Gives back the pages of program code and constants that loading the libraries has touched: of LibTorch 45 MB, most
/// of which registers operators and is never looked at again. Those that are needed come back from the files. For
/// programs, once, when what they load is loaded.
void give_loading_pages_back();

}  // namespace accelerate
