// Ranks of MPI that form worlds. Fails with a text if one is not as it should be.
//
//   mpi_program world     all ranks, twice, the second time beyond MPI_Finalize
//   mpi_program trainers  two worlds side by side and a rank in neither; then a world without MPI
//   mpi_program errors    what is refused, on two ranks
//   mpi_program backend   the backend mpi of two trainers, any threads of which may call MPI
//   mpi_program owner     the same, whose main thread alone may
//   mpi_program waits     three ranks whose calls are under way in different orders
//   mpi_program faults    three ranks over the backend mpi, of which one errs
#include <paceline/mpi.h>
// First, as it has to include what it needs.

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <future>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/record.h>

namespace {

struct Mpi {
  Mpi() { MPI_Init(nullptr, nullptr); }
  explicit Mpi(int level) { MPI_Init_thread(nullptr, nullptr, level, &level); }
  ~Mpi() { end(); }
  void end() {
    if (!ended_) MPI_Finalize();
    ended_ = true;
  }

 private:
  bool ended_ = false;
};

int rank_in(MPI_Comm communicator) {
  int rank = 0;
  MPI_Comm_rank(communicator, &rank);
  return rank;
}

int size_of(MPI_Comm communicator) {
  int size = 0;
  MPI_Comm_size(communicator, &size);
  return size;
}

void expect(int value, int expected, const char* what) {
  if (value == expected) return;
  throw std::runtime_error(fmt::format("{} is {} instead of {}", what, value, expected));
}

// The world has the communicator's ranks, and each adds what only it has.
void expect_world_of(int rank, int size) {
  expect(paceline::get_rank(), rank, "the rank");
  expect(paceline::get_world_size(), size, "the world's size");
  const at::Tensor sum = at::full({1}, 1 << rank, at::kInt);
  paceline::all_reduce(sum);
  expect(sum.item<int>(), (1 << size) - 1, "the sum");
}

void form_one_world() {
  Mpi mpi;
  const int rank = rank_in(MPI_COMM_WORLD);
  const int size = size_of(MPI_COMM_WORLD);
  {
    const auto world = paceline::init_process_group(MPI_COMM_WORLD);
    expect_world_of(rank, size);
  }
  const auto world = paceline::init_process_group(MPI_COMM_WORLD);
  mpi.end();
  expect_world_of(rank, size);
}

void form_trainers() {
  const Mpi mpi;
  const int rank = rank_in(MPI_COMM_WORLD);
  const bool trains = rank < size_of(MPI_COMM_WORLD) - 1;
  MPI_Comm trainer = MPI_COMM_NULL;
  // The ranks of each in descending order.
  MPI_Comm_split(MPI_COMM_WORLD, trains ? rank % 2 : MPI_UNDEFINED, -rank, &trainer);
  if (trains) {
    for (const char* const backend : {"paceline", "gloo"}) {
      const auto world = paceline::init_process_group(trainer, {.backend = backend});
      expect_world_of(rank_in(trainer), size_of(trainer));
    }
    MPI_Comm_free(&trainer);
  }
  const auto world = paceline::init_process_group();
  expect_world_of(rank, size_of(MPI_COMM_WORLD));
}

void expect_refused(const std::function<paceline::World()>& form, const std::string& text) {
  try {
    const auto world = form();
  } catch (const paceline::UsageError& error) {
    if (std::string(error.what()).find(text) != std::string::npos) return;
    throw;
  }
  throw std::runtime_error("no UsageError that says: " + text);
}

void try_errors() {
  using paceline::init_process_group;
  using std::chrono::milliseconds;
  const auto world = [] { return init_process_group(MPI_COMM_WORLD); };
  // Only one rank has options that are refused. It does not leave the other waiting in MPI.
  const auto with_wrong_options_on = [](int rank) {
    paceline::InitOptions options{.timeout = milliseconds(300)};
    if (rank_in(MPI_COMM_WORLD) == rank) options.rank = 0;
    return init_process_group(MPI_COMM_WORLD, options);
  };
  expect_refused(world, "needs MPI between MPI_Init and MPI_Finalize");
  Mpi mpi;
  expect_refused([] { return init_process_group(MPI_Comm(MPI_COMM_NULL)); }, "MPI_COMM_NULL");
  std::async(std::launch::async, [] {
    expect_refused([] { return init_process_group(MPI_COMM_WORLD, {.backend = "mpi"}); },
                   "made on the thread that initialised it");
  }).get();
  expect_refused([&] { return with_wrong_options_on(0); }, "leave out .rank");
  if (rank_in(MPI_COMM_WORLD) == 1) {
    expect_refused([&] { return with_wrong_options_on(1); }, "leave out .rank");
  } else {
    try {
      const auto alone = with_wrong_options_on(1);
      throw std::runtime_error("no Timeout");
    } catch (const paceline::Timeout& error) {
      expect(error.ranks().at(0), 1, "the late rank");
    }
  }
  mpi.end();
  expect_refused(world, "needs MPI between MPI_Init and MPI_Finalize");
}

// Large messages in both directions, and two reductions, all under way at once.
void exchange_with(int other, int own) {
  const at::Tensor sent = at::full({100'000}, own, at::kInt);
  const at::Tensor received = at::zeros_like(sent);
  const at::Tensor first = at::full({3}, own, at::kInt);
  const at::Tensor second = at::full({100'000}, 1, at::kInt);
  auto sending = paceline::send_async(sent, other);
  auto adding = paceline::all_reduce_async(first);
  auto counting = paceline::all_reduce_async(second);
  auto receiving = paceline::recv_async(received, {.src = other});
  counting.wait();
  receiving.wait();
  expect(received.eq(other).all().item<bool>() ? 1 : 0, 1, "what came from the other rank");
  expect(second.sum().item<int>(), 200'000, "the second sum");
  adding.wait();
  expect(first[0].item<int>(), 1, "the first sum");
  sending.wait();
}

// Two worlds of each trainer, one after the other. A message of the first one that nobody receives
// does not come to the second.
void use_backend(int level) {
  const Mpi mpi(level);
  const int rank = rank_in(MPI_COMM_WORLD);
  MPI_Comm trainer = MPI_COMM_NULL;
  // Two ranks each, in descending order.
  MPI_Comm_split(MPI_COMM_WORLD, rank / 2, -rank, &trainer);
  for (int i = 0; i < 2; ++i) {
    const auto world = paceline::init_process_group(trainer, {.backend = "mpi"});
    expect_world_of(rank_in(trainer), size_of(trainer));
    expect(paceline::get_backend() == "mpi" ? 1 : 0, 1, "the backend");
    exchange_with(1 - paceline::get_rank(), paceline::get_rank());
    const auto alone = paceline::new_group({paceline::get_rank()});
    const at::Tensor tensor = at::full({4}, i, at::kInt);
    paceline::all_to_all({tensor}, {tensor}, {.group = alone});
    if (paceline::get_rank() == 0) {
      paceline::send(tensor, 1, {.tag = 5});
      paceline::send(at::full({4}, 9, at::kInt), 1, {.tag = 5});
    } else {
      paceline::recv(tensor, {.src = 0, .tag = 5});
      expect(tensor[0].item<int>(), i, "what came from rank 0");
    }
    paceline::barrier();
  }
  MPI_Comm_free(&trainer);
}

// Only the main thread may call MPI, so a wait for one call has to drive all others.
void wait_in_different_orders() {
  const Mpi mpi;
  const auto world = paceline::init_process_group(MPI_COMM_WORLD, {.backend = "mpi"});
  const int rank = paceline::get_rank();
  const int size = paceline::get_world_size();
  const auto other = paceline::new_group();
  const auto sum = [&] { return at::full({50'000}, 1 << rank, at::kInt); };
  const at::Tensor first = sum();
  const at::Tensor second = sum();
  const at::Tensor third = sum();
  auto in_world = paceline::all_reduce_async(first);
  auto in_other = paceline::all_reduce_async(second, {.group = other});
  // Each waits first for what another one only drives.
  at::Tensor received = at::zeros({50'000}, at::kInt);
  if (rank == 0) {
    paceline::recv(received, {.src = 1});
    in_other.wait();
    in_world.wait();
  } else if (rank == 1) {
    in_world.wait();
    paceline::send(sum(), 0);
    in_other.wait();
  } else {
    while (!in_other.is_completed()) std::this_thread::yield();
    in_other.wait();
    in_world.wait();
  }
  // A group is made while another's call is under way.
  auto before = paceline::all_reduce_async(third);
  if (rank == 1) before.wait();
  const auto made = paceline::new_group();
  if (rank != 1) before.wait();
  paceline::barrier({.group = made});
  for (const at::Tensor& one : {first, second, third}) {
    expect(one[1].item<int>(), (1 << size) - 1, "a sum");
  }
  if (rank == 0) expect(received[0].item<int>(), 2, "what rank 1 sent");
  // Another thread's call is made by this one, in whichever call it waits.
  const at::Tensor fourth = sum();
  const at::Tensor fifth = at::zeros({50'000}, at::kInt);
  auto elsewhere = std::async(std::launch::async, [&] {
    paceline::all_reduce(fourth, {.group = made});
    auto sending = paceline::send_async(sum(), (rank + 1) % size, {.group = made});
    paceline::recv(fifth, {.src = (rank + size - 1) % size, .group = made});
    sending.wait();
  });
  auto driving = paceline::barrier_async({.group = other});
  while (elsewhere.wait_for(std::chrono::milliseconds(0)) != std::future_status::ready) {
    static_cast<void>(driving.is_completed());
  }
  elsewhere.get();
  driving.wait();
  expect(fourth[1].item<int>(), (1 << size) - 1, "the sum of another thread");
  expect(fifth[1].item<int>(), 1 << (rank + size - 1) % size, "what another thread received");
}

template <typename Error>
void expect_error(const std::function<void()>& action, int culprit, const std::string& text) {
  try {
    action();
  } catch (const Error& error) {
    if (error.ranks() == std::vector<int>{culprit} &&
        std::string(error.what()).find(text) != std::string::npos) {
      return;
    }
    throw;
  }
  throw std::runtime_error("no error that says: " + text);
}

void err_over_backend() {
  using std::chrono::milliseconds;
  const auto world = paceline::init_process_group({.backend = "mpi"});
  const int rank = paceline::get_rank();
  const auto group = [] { return paceline::new_group({}, {.timeout = milliseconds(500)}); };
  const at::Tensor tensor = at::zeros({rank == 1 ? 3 : 2});
  const auto unequal = group();
  const auto differ = [&] { paceline::all_reduce(tensor, {.group = unequal}); };
  expect_error<paceline::Mismatch>(differ, 1, "all_reduce of 3 float32");
  expect_error<paceline::Mismatch>(differ, 1, "all_reduce of 3 float32");  // from now on
  const auto late = group();
  const auto silent = group();
  const auto monitored = [&] {
    const auto timeout = std::chrono::seconds(rank == 0 ? 1 : 20);
    paceline::monitored_barrier({.group = late, .timeout = timeout});
  };
  if (rank == 0) expect_error<paceline::Timeout>(monitored, 1, "failed to pass monitoredBarrier");
  paceline::barrier();
  if (rank != 0) expect_error<paceline::Timeout>(monitored, 1, "rank 1 did not pass it");
  paceline::monitored_barrier({.group = late, .timeout = std::chrono::seconds(20)});
  if (rank != 1) {
    expect_error<paceline::Timeout>([&] { paceline::barrier({.group = late}); }, 1, "rank 1 did");
    expect_error<paceline::Timeout>(
        [&] { paceline::recv(at::zeros({2}), {.src = 1, .group = silent}); }, 1, "rank 1 did not");
  }
  paceline::barrier();
  // Where a rank has given something up, it does not finalise MPI, which mpirun may call a failure.
  std::printf("pid=%d rank %d: all were named\n", ::getpid(), rank);
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void()>> modes{
      {"world", form_one_world},
      {"trainers", form_trainers},
      {"errors", try_errors},
      {"backend", [] { use_backend(MPI_THREAD_MULTIPLE); }},
      {"owner", [] { use_backend(MPI_THREAD_FUNNELED); }},
      {"waits", wait_in_different_orders},
      {"faults", err_over_backend}};
  return paceline::record([&] { modes.at(argc > 1 ? argv[1] : "world")(); });
}
