#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <paceline/parameter_server.h>

#include "parallel/ddp/wrapped_model.h"
#include "parallel/parameter_server/flat_tensors.h"
#include "parallel/parameter_server/pair.h"

namespace paceline::parameter_server {

// What a worker sends to a server, each a number, followed by:
// - introduce: the limit of its waits for other workers, in milliseconds, and the text of its
//   model; the answer is a text, empty if the server has the same model
// - join: nothing; the answer is the clock where it may enter
// - enter: its clock
// - pull: nothing; the answer is the version, then the parameters
// - push: the version that the gradients were computed at, then the gradients; the answer is the
//   version after their step
// - leave: nothing; the answer is 0
// In place of a version, the answer may be that other workers are late.
enum class Command : std::int64_t { introduce, join, enter, pull, push, leave };

// `ranks`: of workers whose steps the other end has waited for until its limit.
void send_late(Pair& pair, const std::vector<int>& ranks);
// Throws Timeout if workers are late; `operation` and `limit` are for its text.
std::int64_t receive_version(Pair& pair, const char* operation, std::chrono::milliseconds limit);

// The parameters that servers hold. Throws UsageError as distinct_tensors does, and unless each
// server gets one.
std::vector<ddp::NamedTensor> served_parameters(const ddp::WrappedModel& model, int servers);
// By server: the places of its parameters.
std::vector<ddp::Indices> shards_of(const std::vector<ddp::NamedTensor>& parameters, int servers);
Tensors shard_of(const std::vector<ddp::NamedTensor>& parameters, const ddp::Indices& shard);

// What a server and a worker must have in common, a line each; see Job::find for `servers`.
std::string describe(const ddp::WrappedModel& model, const ParameterServerOptions& options);
// Names the first difference between two such texts; empty if there is none.
std::string compare(const std::string& server_text, int server, const std::string& worker_text,
                    int worker);

}  // namespace paceline::parameter_server
