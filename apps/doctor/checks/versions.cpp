#include <fmt/format.h>

#include <paceline/version.h>

#include "checks/checks.h"

namespace paceline::doctor {
namespace {

// "2.15" of "2.15.0+cpu".
std::string minor_version(const std::string& version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

Check check_libtorch(const VersionFacts& facts) {
  Check check{.name = "libtorch",
              .values = {{"version", facts.libtorch},
                         {"compiled_with", facts.libtorch_compiled},
                         {"path", facts.library.string()},
                         {"found_by", facts.found_by}}};
  check.text = fmt::format("{} in {} ({})", facts.libtorch, facts.library.parent_path().string(),
                           facts.found_by);
  if (minor_version(facts.libtorch) == minor_version(facts.libtorch_compiled)) return check;
  if (facts.libtorch.empty()) {
    check.status = Status::warning;
    check.text =
        fmt::format("in {} ({}); it does not say its version, and Paceline was compiled with {}",
                    facts.library.parent_path().string(), facts.found_by, facts.libtorch_compiled);
    check.advice =
        "make sure that it is the one that Paceline was compiled with; the self test tries it";
    return check;
  }
  check.status = Status::error;
  check.text += fmt::format(", but Paceline was compiled with {}", facts.libtorch_compiled);
  check.advice = facts.found_by == "RUNPATH"
                     ? "build Paceline again with the LibTorch that is installed"
                     : fmt::format("take the other LibTorch out of {}", facts.found_by);
  return check;
}

}  // namespace

Group check_versions(const VersionFacts& facts) {
  return {"versions",
          {{.name = "paceline", .text = kVersion, .values = {{"version", kVersion}}},
           check_libtorch(facts),
           {.name = "system",
            .text = fmt::format("{}, glibc {}, {}", facts.kernel, facts.glibc, facts.compiler),
            .values = {
                {"kernel", facts.kernel}, {"glibc", facts.glibc}, {"compiler", facts.compiler}}}}};
}

}  // namespace paceline::doctor
