#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <unistd.h>

#include <paceline/data_loader.h>
#include <paceline/error.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "base/log.h"
#include "base/start_thread.h"
#include "distributed/intraop_threads.h"

namespace paceline::data::detail {
namespace {

at::Tensor default_random_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::scoped_lock lock(generator.mutex());
  return generator.get_state();
}

}  // namespace

class BatchStream::Impl {
 public:
  Impl(Batches batches, const DataLoaderOptions& options, Fetch fetch, bool checks_generator);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Batch next();
  bool in_forked_child() const { return ::getpid() != owner_; }
  // A thread may hang in a fetch.
  bool timed_out() const { return timed_out_; }

 private:
  struct Slot {
    bool ready = false;
    Batch batch;
    std::exception_ptr error;
  };

  void work(const std::stop_token& stop);
  Slot run(std::int64_t number, const std::stop_token& stop) const;
  Batch take();
  void check_generator();

  const Batches batches_;
  const std::int64_t count_;
  const Fetch fetch_;
  const std::chrono::milliseconds timeout_;  // 0: none
  const pid_t owner_ = ::getpid();
  at::Tensor random_state_;  // when the workers started, until it is checked
  bool failed_ = false;
  bool timed_out_ = false;

  std::mutex mutex_;
  std::condition_variable_any room_;
  std::condition_variable ready_;
  std::vector<Slot> slots_;  // batch n is in slot n % slots_.size(), from claimed_ to taken_
  std::int64_t claimed_ = 0;
  std::int64_t taken_ = 0;  // only the consumer changes it

  std::vector<std::jthread> workers_;  // last: they use everything above
};

BatchStream::Impl::Impl(Batches batches, const DataLoaderOptions& options, Fetch fetch,
                        bool checks_generator)
    : batches_(std::move(batches)),
      count_(static_cast<std::int64_t>(batches_.size())),
      fetch_(std::move(fetch)),
      timeout_(options.timeout) {
  const std::int64_t workers = std::min<std::int64_t>(options.num_workers, count_);
  slots_.resize(static_cast<std::size_t>(
      std::min(count_, workers * static_cast<std::int64_t>(options.prefetch_factor.value_or(2)))));
  if (checks_generator && workers > 0) random_state_ = default_random_state();
  for (std::int64_t i = 0; i < workers; ++i) {
    workers_.push_back(
        base::start_thread<std::jthread>([this](const std::stop_token& stop) { work(stop); }));
  }
}

// All workers get the request before the first is joined.
BatchStream::Impl::~Impl() {
  for (auto& worker : workers_) worker.request_stop();
}

BatchStream::Batch BatchStream::Impl::next() {
  if (failed_ || taken_ == count_) return nullptr;
  try {
    if (workers_.empty()) return fetch_(batches_[static_cast<std::size_t>(taken_++)], {});
    Batch batch = take();
    check_generator();
    return batch;
  } catch (...) {
    failed_ = true;
    for (auto& worker : workers_) worker.request_stop();
    throw;
  }
}

// Until now the program has waited, so that only the workers can have changed it.
void BatchStream::Impl::check_generator() {
  const at::Tensor before = std::exchange(random_state_, {});
  if (!before.defined() || before.equal(default_random_state())) return;
  base::log(LogLevel::warning,
            "DataLoader: the data set draws from LibTorch's default random number generator. All "
            "threads share it, so with num_workers > 0, samples and the model's random numbers "
            "depend on timing. Let its get take an at::Generator& too.");
}

BatchStream::Batch BatchStream::Impl::take() {
  // A longer one would overflow the clock.
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);
  std::unique_lock lock(mutex_);
  Slot& slot = slots_[static_cast<std::size_t>(taken_) % slots_.size()];
  const auto is_ready = [&] { return slot.ready; };
  if (timeout_ == timeout_.zero()) {
    ready_.wait(lock, is_ready);
  } else if (!ready_.wait_for(lock, std::min(timeout_, kLongest), is_ready)) {
    timed_out_ = true;
    throw_timeout(batches_[static_cast<std::size_t>(taken_)], timeout_);
  }
  ++taken_;
  room_.notify_one();
  Slot taken = std::exchange(slot, {});
  if (taken.error) std::rethrow_exception(taken.error);
  return std::move(taken.batch);
}

void BatchStream::Impl::work(const std::stop_token& stop) {
  // Otherwise each worker would start a team of threads.
  const distributed::IntraopThreads one(1);
  const auto capacity = static_cast<std::int64_t>(slots_.size());
  std::unique_lock lock(mutex_);
  const auto may_go_on = [&] { return claimed_ == count_ || claimed_ < taken_ + capacity; };
  while (room_.wait(lock, stop, may_go_on) && !stop.stop_requested() && claimed_ < count_) {
    const std::int64_t number = claimed_++;
    lock.unlock();
    Slot slot = run(number, stop);
    lock.lock();
    slots_[static_cast<std::size_t>(number % capacity)] = std::move(slot);
    if (number == taken_) ready_.notify_one();
  }
}

BatchStream::Impl::Slot BatchStream::Impl::run(std::int64_t number,
                                               const std::stop_token& stop) const {
  try {
    return {true, fetch_(batches_[static_cast<std::size_t>(number)], stop), nullptr};
  } catch (...) {
    return {true, nullptr, std::current_exception()};
  }
}

BatchStream::BatchStream(Batches batches, const DataLoaderOptions& options, Fetch fetch,
                         bool checks_generator)
    : impl_(std::make_unique<Impl>(std::move(batches), options, std::move(fetch),
                                   checks_generator)) {}

BatchStream::BatchStream(BatchStream&&) noexcept = default;
BatchStream& BatchStream::operator=(BatchStream&& other) noexcept {
  std::swap(impl_, other.impl_);  // its destructor ends what this had
  return *this;
}

// A forked child does not have the threads, and may have a lock that one of them held. After a
// timeout, a thread may never end.
BatchStream::~BatchStream() {
  if (impl_ && (impl_->in_forked_child() || impl_->timed_out())) {
    static_cast<void>(impl_.release());
  }
}

BatchStream::Batch BatchStream::next() {
  if (impl_->in_forked_child()) {
    throw UsageError(
        "a DataLoader's iteration cannot go on in a forked child: it belongs to the parent "
        "process");
  }
  return impl_->next();
}

}  // namespace paceline::data::detail
