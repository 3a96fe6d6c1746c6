#include <paceline/checkpoint_directory.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <thread>

#include <paceline/collectives.h>
#include <paceline/error.h>
#include <paceline/reconfigure.h>

#include "base/log.h"
#include "base/start_thread.h"
#include "checkpoint/agreement.h"
#include "checkpoint/checkpoint_place.h"
#include "checkpoint/file_writer.h"
#include "checkpoint/generic_dict.h"
#include "checkpoint/manifest.h"
#include "checkpoint/old_checkpoints.h"
#include "checkpoint/snapshot.h"
#include "checkpoint/torch_file.h"
#include "distributed/process_state.h"
#include "parallel/with_error_context.h"
#include "shm/membership/failure.h"

namespace paceline {
namespace {

namespace fs = std::filesystem;
using checkpoint::attempt;
using checkpoint::empty_dict;
using checkpoint::FileWriter;
using checkpoint::first_problem;
using checkpoint::GenericDict;
using checkpoint::Manifest;
using checkpoint::part_name;
using checkpoint::Place;
using checkpoint::place_of;
using checkpoint::Snapshot;
using nlohmann::json;
using Scope = Stateful::Scope;

constexpr const char* kClass = "CheckpointDirectory";  // in errors
constexpr const char* kRandom = "random state";

// Here, or the library would export the thread's state.
std::thread start_thread(std::function<void()> body) {
  return base::start_thread([body = std::move(body)] { body(); });
}

}  // namespace

class CheckpointDirectory::Impl {
 public:
  Impl(fs::path directory, const CheckpointOptions& options)
      : directory_(std::move(directory)),
        options_(options),
        rank_(get_rank(options.group)),
        size_(get_world_size(options.group)),
        group_(options.group.c10d()),
        handle_(handle_of(options.group)) {
    agree(attempt([&] {
            if (options.keep_last < 0 || options.keep_best < 0) {
              throw UsageError(
                  fmt::format("keep_last is {} and keep_best is {}; they must not be negative",
                              options.keep_last, options.keep_best));
            }
            if (options.keep_best > 0 && options.keep_last == 0) {
              throw UsageError(
                  fmt::format("keep_best is {}, and keep_last is 0, which keeps all checkpoints: "
                              "set keep_last to 1 or more",
                              options.keep_best));
            }
            checkpoint::create_directories(directory_, options.fsync);
          }),
          "cannot be used");
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    if (writer_.joinable()) writer_.join();
  }

  void save(std::int64_t step, const States& states, std::optional<double> metric) {
    if (metric && !std::isfinite(*metric)) metric.reset();
    check_ranks();
    const std::string earlier = attempt([&] { wait(); });
    const Place place = begin_save(step, states);
    Part part{.place = place,
              .manifest = {.id = place.id,
                           .step = step,
                           .world_size = size_,
                           .rank = rank_,
                           .metric = metric,
                           .threads = at::get_num_threads(),
                           .cpu_capability = at::get_cpu_capability()}};
    agree(attempt([&] {
            if (rank_ == 0) remove_incomplete();
            collect(states, part);
          }),
          failed(step));
    pending_ = place;
    if (options_.asynchronous) {
      const std::string error = attempt([&] { start_writer(std::move(part)); });
      if (!error.empty()) writer_error_ = error;
    } else {
      complete(attempt([&] { write(std::move(part)); }));
    }
    // Only now, as this may be the last save before the job ends.
    if (!earlier.empty()) {
      throw Error(fmt::format("{}; the checkpoint of step {} is being written", earlier, step));
    }
  }

  void wait() {
    if (!pending_) return;
    check_ranks();
    if (writer_.joinable()) writer_.join();
    complete(std::exchange(writer_error_, ""));
  }

  std::optional<ResumedCheckpoint> resume(const States& states) {
    check_ranks();
    wait();
    std::vector<Place> places;
    std::string text;
    const std::string error = attempt([&] {
      json list = json::array();
      if (rank_ != 0) return;
      for (const Place& place : checkpoint::places_in(directory_)) {
        list.push_back({place.step, place.id, place.path.filename().string()});
      }
      text = list.dump();
    });
    agree(error, "cannot be read");
    for (const auto& one : json::parse(broadcast_bytes(text, {.group = options_.group}))) {
      places.push_back({one.at(0), one.at(1), directory_ / one.at(2).get<std::string>()});
    }
    std::vector<std::string> damaged;
    for (const Place& place : places) {
      const std::string problem = damage_of(place);
      if (problem.empty()) return load(place, states, damaged);
      if (!place.is_hidden()) damaged.push_back(fmt::format("step {}: {}", place.step, problem));
    }
    if (damaged.empty()) return std::nullopt;
    throw Error(fmt::format("{}: all checkpoints are damaged: {}", directory_.string(),
                            fmt::join(damaged, "; ")));
  }

 private:
  // What this rank writes.
  struct Part {
    Place place;
    Manifest manifest;
    GenericDict shared = empty_dict();
    GenericDict own = empty_dict();
  };

  int global_rank(std::size_t rank) const {
    return distributed::global_rank_of(options_.group, static_cast<int>(rank));
  }

  void check_ranks() const {
    const bool is_same =
        group_.lock() == options_.group.c10d() && handle_of(options_.group) == handle_;
    if (is_same) return;
    throw UsageError(
        fmt::format("CheckpointDirectory: it was constructed on rank {} of {} of a group that has "
                    "ended or was reconfigured since; construct it anew",
                    rank_, size_));
  }
  // Each reconfigure changes it.
  static std::string handle_of(const ProcessGroup& group) {
    return supports_reconfigure(group) ? get_reconfigure_handle(group) : "";
  }

  static std::string failed(std::int64_t step) {
    return fmt::format("the checkpoint of step {} failed", step);
  }
  // Empty if there is none. Throws if a file cannot be read, which may be undamaged. Collective.
  std::string damage_of(const Place& place) const {
    std::string damage;
    const std::string error = attempt([&] {
      try {
        checkpoint::check_parts(place, rank_, size_);
      } catch (const CorruptFile& corrupt) {
        damage = corrupt.what();
      }
    });
    agree(error, fmt::format("the checkpoint of step {} cannot be read", place.step));
    return first_problem(damage, options_.group);
  }

  // Throws on all ranks if one has an error. Collective.
  void agree(const std::string& own, const std::string& what) const {
    const std::string problem = first_problem(own, options_.group);
    if (!problem.empty()) {
      throw Error(fmt::format("{}: {}: {}", directory_.string(), what, problem));
    }
  }

  // Compares what the ranks save, and chooses the id.
  Place begin_save(std::int64_t step, const States& states) const {
    json own{{"step", step}, {"names", json::array()}, {"id", ""}};
    for (const auto& [name, state] : states) {
      own["names"].push_back({name, static_cast<int>(state.scope())});
    }
    if (rank_ == 0) {
      std::random_device random;
      own["id"] = fmt::format("{:08x}{:08x}", random(), random());
    }
    const auto all = parallel::with_error_context(
        "comparing what the ranks save; call save() on all ranks",
        [&] {
          return all_gather_bytes(own.dump(-1, ' ', false, json::error_handler_t::replace),
                                  {.group = options_.group});
        },
        kClass);
    const json first = json::parse(all.front());
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      const json other = json::parse(all[rank]);
      if (other.at("step") == first.at("step") && other.at("names") == first.at("names")) continue;
      throw UsageError(
          fmt::format("CheckpointDirectory::save: rank {} saves step {} of {} states, and rank {} "
                      "step {} of {}, or states of other names: all ranks save the same",
                      global_rank(0), first.at("step").dump(), first.at("names").size(),
                      global_rank(rank), other.at("step").dump(), other.at("names").size()));
    }
    if (step < 0) {
      throw UsageError(
          fmt::format("CheckpointDirectory::save: step is {}; it must not be negative", step));
    }
    std::set<std::string> names;
    for (const auto& [name, state] : states) {
      if (names.insert(name).second && name != kRandom) continue;
      throw UsageError(fmt::format("CheckpointDirectory::save: the name '{}' is in use", name));
    }
    return place_of(directory_, step, first.at("id"));
  }

  void collect(const States& states, Part& part) {
    for (const auto& [name, state] : states) {
      const bool is_shared = state.scope() == Scope::shared;
      if (is_shared && rank_ != 0) continue;
      (is_shared ? part.shared : part.own).insert(name, state.state_dict());
    }
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    {
      const std::scoped_lock lock(generator.mutex());
      part.own.insert(kRandom, generator.get_state());
    }
    if (!options_.asynchronous) return;
    part.shared = shared_copy_.copy(part.shared).toGenericDict();
    part.own = own_copy_.copy(part.own).toGenericDict();
  }

  void write(Part part) const {
    fs::create_directories(part.place.path);
    const auto write_file = [&](const std::string& name, const GenericDict& value) {
      FileWriter file(part.place.path / name, {.fsync = options_.fsync, .checksum = true});
      checkpoint::write_torch_file(value, file);
      part.manifest.files.push_back({name, file.size(), file.crc32()});
    };
    if (rank_ == 0) write_file(checkpoint::kSharedFile, part.shared);
    write_file(part_name(rank_, "pt"), part.own);
    FileWriter file(part.place.path / part_name(rank_, "json"), {.fsync = options_.fsync});
    file.write(write_manifest(part.manifest));
    file.commit();
  }

  void start_writer(Part part) {
    writer_ = start_thread(
        [this, part = std::move(part)] { writer_error_ = attempt([&] { write(part); }); });
  }

  // Gives the pending checkpoint its name, if no rank has an error. Collective.
  void complete(const std::string& error) {
    const Place place = *std::exchange(pending_, std::nullopt);
    std::string problem = first_problem(error, options_.group);
    if (problem.empty()) {
      problem = first_problem(attempt([&] {
                                if (rank_ != 0) return;
                                checkpoint::check_visible(place, size_);
                                publish(place);
                                remove_old(place.step);
                              }),
                              options_.group);
    }
    if (problem.empty()) return;
    attempt([&] { fs::remove_all(place.path); });  // on all ranks: it may be a directory of each
    throw Error(fmt::format("{}: {}: {}", directory_.string(), failed(place.step), problem));
  }

  void publish(const Place& place) const {
    const Place named = place_of(directory_, place.step);
    if (fs::exists(named.path)) {
      const Place old = place_of(directory_, place.step, place.id + checkpoint::kReplaced);
      fs::rename(named.path, old.path);
    }
    fs::rename(place.path, named.path);
    if (options_.fsync) checkpoint::sync_directory(directory_);
  }

  // A process that was ended while it saved has left it, and there may be no room for both.
  void remove_incomplete() const {
    std::error_code ignored;
    if (!fs::exists(directory_)) return;
    for (const Place& place : checkpoint::places_in(directory_)) {
      if (place.is_hidden() && !checkpoint::is_complete(place)) {
        fs::remove_all(place.path, ignored);
      }
    }
  }

  // The new checkpoint is complete, so it is no error if an old one cannot be removed.
  void remove_old(std::int64_t step) const {
    const auto warn = [&](const std::string& problem) {
      if (problem.empty()) return;
      base::log(LogLevel::warning, "{}: an old checkpoint cannot be removed: {}",
                directory_.string(), problem);
    };
    warn(attempt([&] {
      for (const Place& place : checkpoint::old_places(directory_, step, options_)) {
        warn(attempt([&] { checkpoint::remove(place); }));
      }
    }));
  }

  ResumedCheckpoint load(const Place& place, const States& states,
                         const std::vector<std::string>& damaged) {
    const std::string what = fmt::format("resume from step {}", place.step);
    int saved_size = 0;
    std::string change;
    agree(attempt([&] {
            saved_size = load_states(place, states);
            change = describe_change(place);
          }),
          what);
    change = on_which_ranks(change);
    agree(attempt([&] {
            if (rank_ == 0 && place.is_hidden()) publish(place);
          }),
          what);
    std::string message =
        fmt::format("resumed from step {} of {}", place.step, directory_.string());
    if (!damaged.empty()) {
      message += fmt::format("; damaged: {}", fmt::join(damaged, "; "));
    }
    if (saved_size != size_) {
      message += fmt::format("; ranks: {}, and {} when it was saved", size_, saved_size);
    }
    if (!change.empty()) {
      message += fmt::format("; {}: last bits may differ from an uninterrupted run's", change);
    }
    return {place.step, place.is_hidden() ? place_of(directory_, place.step).path : place.path,
            message};
  }

  // "threads have changed from 1 to 2, the instruction set from AVX2 to AVX512" since this rank
  // saved, or rank 0 if there were more or fewer ranks; empty if nothing has changed, or if it is
  // not known.
  std::string describe_change(const Place& place) const {
    Manifest saved = checkpoint::read_manifest(place, 0);
    if (saved.world_size == size_) saved = checkpoint::read_manifest(place, rank_);
    if (saved.threads == 0) return "";
    std::string change;
    if (const int threads = at::get_num_threads(); threads != saved.threads) {
      change = fmt::format("threads have changed from {} to {}", saved.threads, threads);
    }
    if (const std::string now = at::get_cpu_capability(); now != saved.cpu_capability) {
      change += fmt::format("{}the instruction set has changed from {} to {}",
                            change.empty() ? "" : ", ", saved.cpu_capability, now);
    }
    return change;
  }

  // "on ranks 0 and 1, threads ...": the ranks with the first change. Collective.
  std::string on_which_ranks(const std::string& change) const {
    const auto all = all_gather_bytes(change, {.group = options_.group});
    const auto first = std::ranges::find_if_not(all, &std::string::empty);
    if (first == all.end()) return "";
    shm::RankSet ranks;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank] == *first) ranks.insert(global_rank(rank));
    }
    return fmt::format("on {}, {}", shm::describe_ranks(ranks), *first);
  }

  // Returns how many ranks saved them.
  int load_states(const Place& place, const States& states) const {
    const auto read = [&](const std::string& name) {
      return pickle_load(place.path / name).toGenericDict();
    };
    const int saved_size = checkpoint::read_manifest(place, 0).world_size;
    const GenericDict shared = read(checkpoint::kSharedFile);
    GenericDict own = rank_ < saved_size ? read(part_name(rank_, "pt")) : empty_dict();
    for (const auto& [name, state] : states) {
      if (state.scope() == Scope::logical_ranks) {
        state.load_state_dict(logical_states(place, name, saved_size));
        continue;
      }
      const bool is_shared = state.scope() == Scope::shared;
      if (!is_shared && saved_size != size_) {
        throw Error(fmt::format("'{}' is of each rank by itself, of {} ranks; this job has {}",
                                name, saved_size, size_));
      }
      const GenericDict& from = is_shared ? shared : own;
      const auto found = from.find(name);
      if (found == from.end()) throw_missing(fmt::format("'{}'", name), from);
      const std::string error =
          attempt([&state = state, &found] { state.load_state_dict(found->value()); });
      if (!error.empty()) throw Error(fmt::format("'{}': {}", name, error));
    }
    // Last: what was loaded before may have drawn random numbers.
    const auto random = own.find(kRandom);
    if (random != own.end()) {
      at::Generator generator = at::detail::getDefaultCPUGenerator();
      const std::scoped_lock lock(generator.mutex());
      generator.set_state(random->value().toTensor());
    }
    return saved_size;
  }

  [[noreturn]] static void throw_missing(const std::string& state, const GenericDict& part) {
    std::vector<std::string> names;
    for (const auto& one : part) names.push_back(one.key().toStringRef());
    throw Error(fmt::format("there is no {}, but {}", state, fmt::join(names, ", ")));
  }

  GenericDict logical_states(const Place& place, const std::string& name, int saved_size) const {
    GenericDict all = empty_dict();
    for (int rank = 0; rank < saved_size; ++rank) {
      const auto part = pickle_load(place.path / part_name(rank, "pt")).toGenericDict();
      const auto found = part.find(name);
      if (found == part.end()) throw_missing(fmt::format("'{}' of rank {}", name, rank), part);
      for (const auto& one : found->value().toGenericDict()) all.insert(one.key(), one.value());
    }
    return all;
  }

  fs::path directory_;
  CheckpointOptions options_;
  int rank_;
  int size_;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  std::string handle_;
  Snapshot shared_copy_;
  Snapshot own_copy_;
  std::optional<Place> pending_;  // saved, and not named yet
  std::thread writer_;
  std::string writer_error_;  // of `writer_`, once that is joined
};

CheckpointDirectory::CheckpointDirectory(fs::path directory, const CheckpointOptions& options)
    : impl_(parallel::with_error_context(
          "being constructed; construct it on all ranks",
          [&] { return std::make_unique<Impl>(std::move(directory), options); }, kClass)) {}
CheckpointDirectory::CheckpointDirectory(CheckpointDirectory&&) noexcept = default;
CheckpointDirectory& CheckpointDirectory::operator=(CheckpointDirectory&&) noexcept = default;
CheckpointDirectory::~CheckpointDirectory() = default;

void CheckpointDirectory::save(std::int64_t step, const States& states,
                               std::optional<double> metric) {
  impl_->save(step, states, metric);
}
void CheckpointDirectory::wait() {
  impl_->wait();
}
std::optional<ResumedCheckpoint> CheckpointDirectory::resume(const States& states) {
  return parallel::with_error_context(
      "resuming; call resume() on all ranks", [&] { return impl_->resume(states); }, kClass);
}

}  // namespace paceline
