#include <fmt/format.h>

#include "checks/checks.h"

namespace paceline::doctor {

Check check_self_test(const SelfTest& result) {
  Check check{.name = result.backend, .values = {{"passed", result.times.has_value()}}};
  if (!result.times) {
    check.status = Status::error;
    check.text = result.error;
    check.advice = "mend the errors above first, if there are any";
    return check;
  }
  check.values["init_ms"] = result.times->init_ms;
  check.values["all_reduce_us"] = result.times->all_reduce_us;
  check.text = fmt::format("two ranks met in {:.0f} ms; an all_reduce of 4 bytes takes {:.{}f} us",
                           result.times->init_ms, result.times->all_reduce_us,
                           result.times->all_reduce_us < 10 ? 1 : 0);
  return check;
}

}  // namespace paceline::doctor
