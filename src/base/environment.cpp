#include "base/environment.h"

#include <fmt/format.h>

#include <paceline/error.h>

#include <charconv>
#include <cstdlib>
#include <limits>
#include <string_view>

namespace paceline::base {
namespace {

template <typename Integer>
Integer parse_integer(const char* name, std::string_view text, Integer low, Integer high) {
  Integer value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    throw UsageError(fmt::format("{}={} is not an integer {}", name, text,
                                 high == std::numeric_limits<Integer>::max()
                                     ? fmt::format("of at least {}", low)
                                     : fmt::format("from {} to {}", low, high)));
  }
  return value;
}

class Reader {
 public:
  explicit Reader(const Getenv& getenv) : getenv_(getenv) {}

  std::optional<std::string> text(const char* name) const {
    const char* const value = getenv_(name);
    if (value == nullptr || *value == '\0') return std::nullopt;
    return value;
  }

  std::optional<int> integer(const char* name, int low,
                             int high = std::numeric_limits<int>::max()) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    return parse_integer(name, *value, low, high);
  }

  template <typename Integer>
  std::vector<Integer> integers(const char* name) const {
    std::vector<Integer> values;
    const auto list = text(name);
    if (!list) return values;
    for (std::size_t begin = 0; begin <= list->size();) {
      const std::size_t end = std::min(list->find(',', begin), list->size());
      values.push_back(parse_integer<Integer>(name,
                                              std::string_view(*list).substr(begin, end - begin), 0,
                                              std::numeric_limits<Integer>::max()));
      begin = end + 1;
    }
    return values;
  }

 private:
  const Getenv& getenv_;
};

void check_below(const char* name, std::optional<int> value, const char* bound_name,
                 std::optional<int> bound) {
  if (value && bound && *value >= *bound) {
    throw UsageError(fmt::format("{}={} is not less than {}={}", name, *value, bound_name, *bound));
  }
}

std::optional<Environment::Terminal> parse_terminal(const std::vector<std::int64_t>& numbers) {
  if (numbers.empty()) return std::nullopt;
  constexpr std::int64_t kMost = 10000;
  if (numbers[0] < 1 || numbers[0] > kMost) {
    throw UsageError(
        fmt::format("PACELINE_TERMINAL={},...: expected 1 to {} columns", numbers[0], kMost));
  }
  return Environment::Terminal{static_cast<int>(numbers[0]), {numbers.begin() + 1, numbers.end()}};
}

std::optional<Environment::OtherLauncher> find_other_launcher(const Reader& read) {
  struct Names {
    const char* size;
    const char* rank;
    const char* local_rank;
    const char* condition;  // a variable that must be set too; may be null
  };
  // The first launcher found decides: mpirun in a Slurm job starts its daemons by srun, and ranks
  // inherit the variables of the daemons' step. sbatch alone sets the number of the job's tasks
  // too, but its script is not one of them.
  constexpr Names kLaunchers[] = {
      {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", nullptr},
      {"PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", nullptr},
      {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID"},
      {"SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID"}};
  for (const Names& names : kLaunchers) {
    const auto size = read.text(names.size);
    if (!size || (names.condition != nullptr && !read.text(names.condition))) continue;
    if (*size == "1") return std::nullopt;
    return Environment::OtherLauncher{fmt::format("{}={}, {}={}", names.size, *size, names.rank,
                                                  read.text(names.rank).value_or("")),
                                      fmt::format("RANK=${}, WORLD_SIZE=${}, LOCAL_RANK=${}",
                                                  names.rank, names.size, names.local_rank)};
  }
  // PMIx has no variable for the size.
  if (const auto rank = read.text("PMIX_RANK")) {
    return Environment::OtherLauncher{fmt::format("PMIX_RANK={}", *rank),
                                      "RANK=$PMIX_RANK, WORLD_SIZE=<number of processes>"};
  }
  return std::nullopt;
}

}  // namespace

Environment parse_environment(const Getenv& getenv) {
  const Reader read(getenv);
  Environment result;
  result.rank = read.integer("RANK", 0);
  result.world_size = read.integer("WORLD_SIZE", 1);
  result.local_rank = read.integer("LOCAL_RANK", 0);
  result.local_world_size = read.integer("LOCAL_WORLD_SIZE", 1);
  result.node_rank = read.integer("GROUP_RANK", 0);
  result.master_addr = read.text("MASTER_ADDR");
  result.master_port = read.integer("MASTER_PORT", 0, 65535);
  result.use_agent_store = read.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  result.restart_count = read.integer("TORCHELASTIC_RESTART_COUNT", 0);
  result.error_file = read.text("TORCHELASTIC_ERROR_FILE");
  result.other_launcher = find_other_launcher(read);
  result.bootstrap_sockets = read.integers<int>("PACELINE_BOOTSTRAP_SOCKETS");
  result.store_fd = read.integer("PACELINE_STORE_FD", 0);
  result.terminal = parse_terminal(read.integers<std::int64_t>("PACELINE_TERMINAL"));
  result.data_root = read.text("PACELINE_DATA");
  result.timeline = read.text("PACELINE_TIMELINE");
  check_below("RANK", result.rank, "WORLD_SIZE", result.world_size);
  check_below("LOCAL_RANK", result.local_rank, "LOCAL_WORLD_SIZE", result.local_world_size);
  return result;
}

const Environment& environment() {
  static const Environment instance =
      parse_environment([](const char* name) { return std::getenv(name); });
  return instance;
}

}  // namespace paceline::base
