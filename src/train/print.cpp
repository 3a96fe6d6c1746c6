#include <paceline/print.h>

#include <fcntl.h>
#include <torch/utils.h>
#include <unistd.h>

#include <iostream>
#include <mutex>
#include <string>

#include "base/errno_error.h"
#include "base/unique_fd.h"

namespace paceline {
namespace {

// Where standard output leads, after silence_other_ranks; null before.
struct SilencedOutput {
  std::mutex mutex;
  std::FILE* original = nullptr;
};

SilencedOutput& silenced() {
  static SilencedOutput instance;
  return instance;
}

}  // namespace

void print(std::string_view text, const PrintOptions& options) {
  if (!options.force && get_rank() != 0) return;
  const std::string line = std::string(text) + '\n';
  SilencedOutput& output = silenced();
  const std::lock_guard lock(output.mutex);
  const bool is_silenced = options.output == stdout && output.original != nullptr;
  std::FILE* const file = is_silenced ? output.original : options.output;
  std::fwrite(line.data(), 1, line.size(), file);
  if (is_silenced) std::fflush(file);
}

void silence_other_ranks() {
  if (get_rank() == 0) return;
  SilencedOutput& output = silenced();
  const std::lock_guard lock(output.mutex);
  if (output.original != nullptr) return;
  base::UniqueFd original(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  const base::UniqueFd nowhere(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  if (!original || !nowhere) throw base::errno_error("silence_other_ranks: no descriptor is left");
  std::cout.flush();
  std::fflush(stdout);
  std::FILE* const file = ::fdopen(original.get(), "w");
  if (file == nullptr) throw base::errno_error("silence_other_ranks: no stream can be opened");
  original.release();
  ::dup2(nowhere.get(), STDOUT_FILENO);
  output.original = file;
}

std::uint64_t manual_seed(std::uint64_t seed, const ManualSeedOptions& options) {
  const std::uint64_t own = seed + (options.per_rank ? static_cast<std::uint64_t>(get_rank()) : 0);
  torch::manual_seed(own);
  return own;
}

}  // namespace paceline
