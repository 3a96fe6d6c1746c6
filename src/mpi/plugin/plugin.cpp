// The plug-in for the MPI whose mpi.h this is compiled with.

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "mpi/library.h"

namespace paceline::mpi {
namespace {

using shm::DataType;
using shm::ReduceOp;

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw std::runtime_error(std::string(call) + ": " + text.data());
}

// A handle is a pointer or an int.
std::uintptr_t number_of(MPI_Request request) {
  static_assert(sizeof(MPI_Request) <= sizeof(std::uintptr_t));
  std::uintptr_t number = 0;
  std::memcpy(&number, &request, sizeof(request));
  return number;
}

MPI_Request request_of(std::uintptr_t number) {
  MPI_Request request = MPI_REQUEST_NULL;
  std::memcpy(&request, &number, sizeof(request));
  return request;
}

Library::Reduce reduce_function = nullptr;

// An MPI_User_function. MPI passes no context, so there is one for each type and operation.
template <DataType type, ReduceOp op>
void combine(void* in, void* inout, int* count, MPI_Datatype* /*type*/) {
  reduce_function(type, op, in, inout, static_cast<std::size_t>(*count));
}

constexpr auto kTypes = static_cast<std::size_t>(DataType::byte);
constexpr auto kOps = static_cast<std::size_t>(ReduceOp::bit_xor) + 1;

template <std::size_t... number>
constexpr std::array<MPI_User_function*, sizeof...(number)> combiners(
    std::index_sequence<number...> /*all*/) {
  return {&combine<static_cast<DataType>(number / kOps), static_cast<ReduceOp>(number % kOps)>...};
}

MPI_Op own_op(DataType type, ReduceOp op) {
  static constexpr auto functions = combiners(std::make_index_sequence<kTypes * kOps>());
  static std::map<std::size_t, MPI_Op> ops;
  const std::size_t number = static_cast<std::size_t>(type) * kOps + static_cast<std::size_t>(op);
  const auto [found, is_new] = ops.emplace(number, MPI_OP_NULL);
  if (is_new) check(MPI_Op_create(functions[number], 1, &found->second), "MPI_Op_create");
  return found->second;
}

// The type by its size where MPI does not reduce it.
MPI_Datatype datatype_of(DataType type) {
  switch (type) {
    case DataType::float32:
      return MPI_FLOAT;
    case DataType::float64:
      return MPI_DOUBLE;
    case DataType::float16:
    case DataType::bfloat16:
    case DataType::uint16:
      return MPI_UINT16_T;
    case DataType::uint32:
    case DataType::complex32:
      return MPI_UINT32_T;
    case DataType::uint64:
      return MPI_UINT64_T;
    case DataType::int8:
      return MPI_INT8_T;
    case DataType::uint8:
    case DataType::boolean:
    case DataType::float8_e5m2:
    case DataType::float8_e4m3fn:
    case DataType::float8_e5m2fnuz:
    case DataType::float8_e4m3fnuz:
    case DataType::float8_e8m0fnu:
      return MPI_UINT8_T;
    case DataType::int16:
      return MPI_INT16_T;
    case DataType::int32:
      return MPI_INT32_T;
    case DataType::int64:
      return MPI_INT64_T;
    case DataType::complex64:
      return MPI_C_FLOAT_COMPLEX;
    case DataType::complex128:
      return MPI_C_DOUBLE_COMPLEX;
    case DataType::byte:
      break;
  }
  return MPI_BYTE;
}

MPI_Op builtin_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      return MPI_SUM;
    case ReduceOp::product:
      return MPI_PROD;
    case ReduceOp::min:
      return MPI_MIN;
    case ReduceOp::max:
      return MPI_MAX;
    case ReduceOp::bit_and:
      return MPI_BAND;
    case ReduceOp::bit_or:
      return MPI_BOR;
    case ReduceOp::bit_xor:
      return MPI_BXOR;
  }
  throw std::runtime_error("an operation that MPI does not have");
}

// MPI has no half types, and another bool. Its MIN and MAX may ignore NaN, and MPICH 4.0 takes
// MPI_UINT8_T for a signed type there.
MPI_Op op_of(DataType type, ReduceOp op) {
  const bool half = type == DataType::float16 || type == DataType::bfloat16;
  const bool is_signed_integer = type == DataType::int8 || type == DataType::int16 ||
                                 type == DataType::int32 || type == DataType::int64;
  const bool compares = op == ReduceOp::min || op == ReduceOp::max;
  if (half || type == DataType::boolean || (compares && !is_signed_integer)) {
    return own_op(type, op == ReduceOp::avg ? ReduceOp::sum : op);
  }
  return builtin_op(op);
}

// Calls start(first, count, request) for consecutive slices of at most kMaxBytes.
template <typename Start>
void in_slices(std::size_t count, std::size_t element, Requests& requests, Start start) {
  const std::size_t most = Communicator::kMaxBytes / element;
  std::size_t first = 0;
  do {
    const std::size_t slice = std::min(count - first, most);
    MPI_Request request = MPI_REQUEST_NULL;
    start(first, static_cast<int>(slice), &request);
    requests.push_back(number_of(request));
    first += slice;
  } while (first < count);
}

template <typename Start>
void in_one(Requests& requests, Start start) {
  in_slices(0, 1, requests, [&](std::size_t, int, MPI_Request* request) { start(request); });
}

const std::byte* at(const void* data, std::size_t offset) {
  return static_cast<const std::byte*>(data) + offset;
}
std::byte* at(void* data, std::size_t offset) {
  return static_cast<std::byte*>(data) + offset;
}

// shm::element_size, which is not linked.
std::size_t size_of(MPI_Datatype type) {
  int size = 0;
  check(MPI_Type_size(type, &size), "MPI_Type_size");
  return static_cast<std::size_t>(size);
}

bool is_over() {
  int over = 0;
  return MPI_Finalized(&over) != MPI_SUCCESS || over != 0;
}

class OwnedCommunicator final : public Communicator {
 public:
  // Takes the communicator over.
  explicit OwnedCommunicator(MPI_Comm communicator) : communicator_(communicator) {
    check(MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }
  OwnedCommunicator(const OwnedCommunicator&) = delete;
  OwnedCommunicator& operator=(const OwnedCommunicator&) = delete;
  ~OwnedCommunicator() override {
    if (is_over()) return;
    // MPICH 4.0 would give messages that nobody has received to the next communicator. Small ones
    // are here as a whole, so receiving them does not wait.
    constexpr int kSmall = 1024;
    for (int arrived = 1; arrived != 0;) {
      MPI_Status status{};
      int bytes = 0;
      if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, communicator_, &arrived, &status) !=
              MPI_SUCCESS ||
          arrived == 0 || MPI_Get_count(&status, MPI_BYTE, &bytes) != MPI_SUCCESS ||
          bytes > kSmall) {
        break;
      }
      std::vector<std::byte> message(static_cast<std::size_t>(bytes));
      MPI_Recv(message.data(), bytes, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, communicator_,
               MPI_STATUS_IGNORE);
    }
    MPI_Comm_free(&communicator_);
  }

  int rank() const override {
    int rank = 0;
    check(MPI_Comm_rank(communicator_, &rank), "MPI_Comm_rank");
    return rank;
  }
  int size() const override {
    int size = 0;
    check(MPI_Comm_size(communicator_, &size), "MPI_Comm_size");
    return size;
  }
  std::unique_ptr<Communicator> duplicate() override {
    MPI_Comm copy = MPI_COMM_NULL;
    check(MPI_Comm_dup(communicator_, &copy), "MPI_Comm_dup");
    return std::make_unique<OwnedCommunicator>(copy);
  }

  void broadcast(void* data, std::size_t bytes, int root, Requests& requests) override {
    in_slices(bytes, 1, requests, [&](std::size_t first, int count, MPI_Request* request) {
      check(MPI_Ibcast(at(data, first), count, MPI_BYTE, root, communicator_, request),
            "MPI_Ibcast");
    });
  }

  void all_reduce(const void* input, void* output, std::size_t count, DataType type, ReduceOp op,
                  Requests& requests) override {
    const MPI_Datatype datatype = datatype_of(type);
    in_slices(count, size_of(datatype), requests,
              [&](std::size_t first, int slice, MPI_Request* request) {
                const std::size_t offset = first * size_of(datatype);
                check(MPI_Iallreduce(input == output ? MPI_IN_PLACE : at(input, offset),
                                     at(output, offset), slice, datatype, op_of(type, op),
                                     communicator_, request),
                      "MPI_Iallreduce");
              });
  }

  void reduce(const void* input, void* output, std::size_t count, DataType type, ReduceOp op,
              int root, Requests& requests) override {
    const MPI_Datatype datatype = datatype_of(type);
    const bool in_place = rank() == root && input == output;
    in_slices(count, size_of(datatype), requests,
              [&](std::size_t first, int slice, MPI_Request* request) {
                const std::size_t offset = first * size_of(datatype);
                check(MPI_Ireduce(in_place ? MPI_IN_PLACE : at(input, offset),
                                  output == nullptr ? nullptr : at(output, offset), slice, datatype,
                                  op_of(type, op), root, communicator_, request),
                      "MPI_Ireduce");
              });
  }

  void reduce_scatter(const void* input, void* output, std::size_t count, DataType type,
                      ReduceOp op, Requests& requests) override {
    in_one(requests, [&](MPI_Request* request) {
      check(MPI_Ireduce_scatter_block(input, output, static_cast<int>(count), datatype_of(type),
                                      op_of(type, op), communicator_, request),
            "MPI_Ireduce_scatter_block");
    });
  }

  void all_gather(const void* input, void* output, std::size_t bytes, Requests& requests) override {
    const bool in_place = input == at(output, static_cast<std::size_t>(rank()) * bytes);
    in_one(requests, [&](MPI_Request* request) {
      check(MPI_Iallgather(in_place ? MPI_IN_PLACE : input, static_cast<int>(bytes), MPI_BYTE,
                           output, static_cast<int>(bytes), MPI_BYTE, communicator_, request),
            "MPI_Iallgather");
    });
  }

  void all_to_all(const void* input, void* output, std::size_t bytes, Requests& requests) override {
    in_one(requests, [&](MPI_Request* request) {
      check(MPI_Ialltoall(input, static_cast<int>(bytes), MPI_BYTE, output, static_cast<int>(bytes),
                          MPI_BYTE, communicator_, request),
            "MPI_Ialltoall");
    });
  }

  void send(const void* data, std::size_t bytes, int to, std::uint32_t tag,
            Requests& requests) override {
    in_slices(bytes, 1, requests, [&](std::size_t first, int count, MPI_Request* request) {
      check(MPI_Isend(at(data, first), count, MPI_BYTE, to, static_cast<int>(tag), communicator_,
                      request),
            "MPI_Isend");
    });
  }

  void receive(void* data, std::size_t bytes, int from, std::uint32_t tag,
               Requests& requests) override {
    in_slices(bytes, 1, requests, [&](std::size_t first, int count, MPI_Request* request) {
      check(MPI_Irecv(at(data, first), count, MPI_BYTE, from == kAnyRank ? MPI_ANY_SOURCE : from,
                      static_cast<int>(tag), communicator_, request),
            "MPI_Irecv");
    });
  }

  bool test(Requests& requests, int* sender) override {
    while (!requests.empty()) {
      MPI_Request request = request_of(requests.back());
      int complete = 0;
      MPI_Status status{};
      check(MPI_Test(&request, &complete, &status), "MPI_Test");
      if (complete == 0) return false;
      if (sender != nullptr) *sender = status.MPI_SOURCE;
      requests.pop_back();
    }
    return true;
  }

  void cancel(const Requests& receives) override {
    for (const std::uintptr_t number : receives) {
      MPI_Request request = request_of(number);
      check(MPI_Cancel(&request), "MPI_Cancel");
    }
  }

 private:
  MPI_Comm communicator_;
};

class OwnGroup {
 public:
  explicit OwnGroup(MPI_Comm communicator) {
    check(MPI_Comm_group(communicator, &group), "MPI_Comm_group");
  }
  OwnGroup(const OwnGroup& all, const std::vector<int>& ranks) {
    check(MPI_Group_incl(all.group, static_cast<int>(ranks.size()), ranks.data(), &group),
          "MPI_Group_incl");
  }
  OwnGroup(const OwnGroup&) = delete;
  OwnGroup& operator=(const OwnGroup&) = delete;
  ~OwnGroup() { MPI_Group_free(&group); }

  MPI_Group group = MPI_GROUP_NULL;
};

MPI_Comm communicator_of(std::optional<int> handle) {
  return handle ? MPI_Comm_f2c(static_cast<MPI_Fint>(*handle)) : MPI_COMM_WORLD;
}

bool finalizes = false;
pid_t initializer = 0;

class ThisLibrary final : public Library {
 public:
  void start(Reduce reduce) override {
    reduce_function = reduce;
    int begun = 0;
    check(MPI_Initialized(&begun), "MPI_Initialized");
    int provided = MPI_THREAD_SINGLE;
    if (begun != 0) {
      if (is_over()) throw std::runtime_error("MPI_Finalize has been called");
      check(MPI_Query_thread(&provided), "MPI_Query_thread");
    } else {
      check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
      finalizes = true;
      initializer = ::getpid();
      std::atexit([] {
        if (finalizes && ::getpid() == initializer && !is_over()) MPI_Finalize();
      });
    }
    // MPI's constants ascend. If the program has initialised MPI, it calls it, too.
    if (provided >= MPI_THREAD_MULTIPLE) {
      threads_ = Threads::multiple;
    } else if (provided >= MPI_THREAD_SERIALIZED && begun == 0) {
      threads_ = Threads::one_at_a_time;
    }
  }

  Threads threads() const override { return threads_; }
  bool is_main_thread() const override {
    int is_main = 0;
    check(MPI_Is_thread_main(&is_main), "MPI_Is_thread_main");
    return is_main != 0;
  }
  bool is_finalized() const override { return is_over(); }
  void do_not_finalize() override { finalizes = false; }
  int max_tag() const override {
    int* limit = nullptr;
    int found = 0;
    check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&limit), &found),
          "MPI_Comm_get_attr");
    return found == 0 ? 32767 : *limit;
  }

  int rank_in(std::optional<int> communicator) override {
    int rank = 0;
    check(MPI_Comm_rank(communicator_of(communicator), &rank), "MPI_Comm_rank");
    return rank;
  }
  std::unique_ptr<Communicator> form(std::optional<int> communicator, const std::vector<int>& ranks,
                                     int tag) override {
    MPI_Comm formed = MPI_COMM_NULL;
    if (ranks.size() == 1) {
      // What Open MPI 4.1 creates of a group of one rank is sometimes invalid.
      check(MPI_Comm_dup(MPI_COMM_SELF, &formed), "MPI_Comm_dup");
    } else {
      const MPI_Comm parent = communicator_of(communicator);
      const OwnGroup all(parent);
      const OwnGroup chosen(all, ranks);
      check(MPI_Comm_create_group(parent, chosen.group, tag, &formed), "MPI_Comm_create_group");
    }
    return std::make_unique<OwnedCommunicator>(formed);
  }

 private:
  Threads threads_ = Threads::one;
};

}  // namespace
}  // namespace paceline::mpi

extern "C" __attribute__((visibility("default"))) paceline::mpi::Library* paceline_mpi_library_2() {
  static paceline::mpi::ThisLibrary library;
  return &library;
}
