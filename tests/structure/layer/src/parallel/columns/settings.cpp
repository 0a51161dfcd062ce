#include "config/layer_settings.hpp"

namespace accelerate::config {
namespace {

constexpr Option kRows[] = {
    {.name = "columns_size",
     .kind = Kind::integer,
     .value = "N",
     .help = "Ranks that share the columns of each parameter, for programs with a ColumnsPlugin",
     .section = "columns_config",
     .variable = "ACCELERATE_COLUMNS_SIZE",
     .form = Form::text},
};

}  // namespace

OptionGroup settings_of_columns() { return {"Columns", kRows}; }

}  // namespace accelerate::config
