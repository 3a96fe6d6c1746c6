#include "base/environment.h"

#include <fmt/format.h>

#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>

#include <paceline/error.h>

#include "base/environment_reader.h"

namespace paceline::base {
namespace {

std::optional<Environment::Terminal> parse_terminal(const std::vector<std::int64_t>& numbers) {
  if (numbers.empty()) return std::nullopt;
  constexpr std::int64_t kMost = 10000;
  if (numbers[0] < 1 || numbers[0] > kMost) {
    throw UsageError(
        fmt::format("PACELINE_TERMINAL={},...: expected 1 to {} columns", numbers[0], kMost));
  }
  return Environment::Terminal{static_cast<int>(numbers[0]), {numbers.begin() + 1, numbers.end()}};
}

std::optional<Environment::Spawned> parse_spawned(const std::vector<std::int64_t>& numbers) {
  if (numbers.empty()) return std::nullopt;
  if (numbers.size() != 2) {
    throw UsageError(fmt::format(
        "PACELINE_SPAWN has {} numbers; expected CALL,PID, as spawn sets it", numbers.size()));
  }
  return Environment::Spawned{static_cast<int>(numbers[0]), static_cast<int>(numbers[1])};
}

// Where RANK is not set, another launcher's variables stand in for it.
void take_over(const LaunchedProcess& process, Environment& result) {
  result.rank = process.rank;
  result.world_size = process.size;
  if (!result.local_rank && !result.local_world_size && !result.node_rank) {
    result.local_rank = process.local_rank;
    result.local_world_size = process.local_size;
    result.node_rank = process.node;
  }
  if (!result.master_addr && !process.is_local()) result.master_addr = process.host;
  if (!result.master_port) result.master_port = process.port;
  if (!result.master_port && process.is_job_global && !process.job.empty()) {
    result.master_port = port_of_job(process.job);
  }
}

}  // namespace

Environment parse_environment(const Getenv& getenv) {
  const EnvironmentReader read(getenv);
  Environment result;
  result.rank = read.integer("RANK", 0);
  result.world_size = read.integer("WORLD_SIZE", 1);
  result.local_rank = read.integer("LOCAL_RANK", 0);
  result.local_world_size = read.integer("LOCAL_WORLD_SIZE", 1);
  result.node_rank = read.integer("GROUP_RANK", 0);
  result.master_addr = read.text("MASTER_ADDR");
  result.master_port = read.integer("MASTER_PORT", 0, 65535);
  result.use_agent_store = read.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  result.run_id = read.text("TORCHELASTIC_RUN_ID");
  result.restart_count = read.integer("TORCHELASTIC_RESTART_COUNT", 0);
  result.error_file = read.text("TORCHELASTIC_ERROR_FILE");
  result.signals_to_handle = read.text("TORCHELASTIC_SIGNALS_TO_HANDLE");
  for (const std::int64_t fd :
       read.integers("PACELINE_BOOTSTRAP_SOCKETS", std::numeric_limits<int>::max())) {
    result.bootstrap_sockets.push_back(static_cast<int>(fd));
  }
  result.store_fd = read.integer("PACELINE_STORE_FD", 0);
  result.max_replacements = read.integer("PACELINE_MAX_REPLACEMENTS", 0);
  result.terminal = parse_terminal(read.integers("PACELINE_TERMINAL"));
  result.spawned = parse_spawned(read.integers("PACELINE_SPAWN", std::numeric_limits<int>::max()));
  result.error_fd = read.integer("PACELINE_ERROR_FD", 0);
  result.sets_threads = read.text("OMP_NUM_THREADS") || read.text("MKL_NUM_THREADS");
  result.data_root = read.text("PACELINE_DATA");
  result.worker_server_socket = read.text("TORCH_WORKER_SERVER_SOCKET");
  result.timeline = read.text("PACELINE_TIMELINE");
  check_below("RANK", result.rank, "WORLD_SIZE", result.world_size);
  check_below("LOCAL_RANK", result.local_rank, "LOCAL_WORLD_SIZE", result.local_world_size);
  // What torchrun or `paceline run` says holds: another launcher may have started it.
  if (result.run_id) return result;
  try {
    result.launched = find_launched_process(getenv);
  } catch (const UsageError& error) {
    result.launched_error = error.what();
  }
  const auto& launched = result.launched;
  if (launched && launched->size && !result.rank &&
      result.world_size.value_or(*launched->size) == *launched->size) {
    take_over(*launched, result);
    result.numbered_by_launched = true;
  }
  return result;
}

namespace {

// Never destroyed, as threads that outlive main may still read it.
struct Snapshots {
  std::mutex mutex;
  std::vector<std::unique_ptr<const Environment>> all;  // each differs from the one before
  std::atomic<const Environment*> current{nullptr};
};

Snapshots& snapshots() {
  static auto* const instance = new Snapshots;
  return *instance;
}

}  // namespace

const Environment& environment() {
  const Environment* const current = snapshots().current.load(std::memory_order_acquire);
  return current != nullptr ? *current : refresh_environment();
}

const Environment& refresh_environment() {
  Snapshots& kept = snapshots();
  const std::lock_guard lock(kept.mutex);
  auto now = std::make_unique<const Environment>(
      parse_environment([](const char* name) { return std::getenv(name); }));
  if (kept.all.empty() || *kept.all.back() != *now) {
    kept.current.store(now.get(), std::memory_order_release);
    kept.all.push_back(std::move(now));
  }
  return *kept.all.back();
}

}  // namespace paceline::base
