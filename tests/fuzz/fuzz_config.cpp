#include <paceline/error.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "train/yaml_file.h"

// Any bytes give values, or UsageError. Each value is read again as it is written, under a name of
// a program's.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace paceline::train;
  const std::string text(reinterpret_cast<const char*>(bytes), size);
  try {
    for (ConfigValue& value : parse_yaml(text, "fuzz")) {
      value.name = "optimizer.lr";
      const auto again = parse_yaml(write_yaml({value}), "written");
      if (again.size() != 1 || again[0].name != value.name || again[0].texts != value.texts) {
        std::abort();
      }
    }
  } catch (const paceline::UsageError&) {  // as it should be
  }
  try {
    parse_yaml_list(text, "fuzz");
  } catch (const paceline::UsageError&) {  // as it should be
  }
  return 0;
}
