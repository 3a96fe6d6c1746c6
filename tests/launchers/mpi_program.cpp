// Ranks of MPI that form worlds. Fails with a text if one is not as it should be.
//
//   mpi_program world     all ranks, twice, the second time beyond MPI_Finalize
//   mpi_program trainers  two worlds side by side and a rank in neither; then a world without MPI
//   mpi_program errors    what is refused, on two ranks
#include <paceline/mpi.h>
// First, as it has to include what it needs.

#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <chrono>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>

#include <paceline/collectives.h>
#include <paceline/record.h>

namespace {

struct Mpi {
  Mpi() { MPI_Init(nullptr, nullptr); }
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

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void()>> modes{
      {"world", form_one_world}, {"trainers", form_trainers}, {"errors", try_errors}};
  return paceline::record([&] { modes.at(argc > 1 ? argv[1] : "world")(); });
}
