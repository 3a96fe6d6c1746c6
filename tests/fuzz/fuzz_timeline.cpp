#include <paceline/error.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "report/analysis/diagnosis.h"
#include "report/timelines/job.h"

// Whatever the bytes: a timeline with a diagnosis, or CorruptFile.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(bytes), size);
  try {
    const auto job = paceline::report::merge({paceline::report::parse_timeline(text, "fuzz")});
    if (paceline::report::diagnose(paceline::report::analyse(job)).sentence.empty()) std::abort();
  } catch (const paceline::CorruptFile&) {  // as it should be
  }
  return 0;
}
