// A tour of distributed training: each collective, gradient accumulation, DistributedDataParallel,
// a parameter server, a ring, and a pipeline. At each stop it prints what every rank has before and
// after.

#include <torch/torch.h>

#include <paceline/paceline.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

// "[1 2 3]"
std::string text_of(const torch::Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  const torch::Tensor values = tensor.detach().flatten().to(torch::kDouble);
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    text << (i == 0 ? "" : " ") << values[i].item<double>();
  }
  text << ']';
  return text.str();
}

std::string text_of(const std::vector<torch::Tensor>& tensors) {
  if (tensors.empty()) return "-";
  std::string text;
  for (const torch::Tensor& tensor : tensors) text += text_of(tensor);
  return text;
}

// Prints a stop's heading, and a line for each rank with what it has before and after. Every rank
// calls it with its own.
void show(const char* title, const char* what, const std::string& before,
          const std::string& after) {
  const auto all_before = paceline::all_gather_bytes(before);
  const auto all_after = paceline::all_gather_bytes(after);
  if (paceline::get_rank() != 0) return;
  std::printf("\n%s: %s\n", title, what);
  for (std::size_t rank = 0; rank < all_before.size(); ++rank) {
    std::printf("  rank %zu   %-20s ->  %s\n", rank, all_before[rank].c_str(),
                all_after[rank].c_str());
  }
  std::fflush(stdout);
}

// Rank r begins with 10 r + 1, 10 r + 2, ..., so that a number shows where it comes from.
torch::Tensor numbers(std::int64_t count) {
  return torch::arange(1, count + 1, torch::kFloat) + 10 * paceline::get_rank();
}
std::vector<torch::Tensor> empty_tensors(std::int64_t count) {
  std::vector<torch::Tensor> all;
  for (int rank = 0; rank < paceline::get_world_size(); ++rank) {
    all.push_back(torch::zeros({count}));
  }
  return all;
}

void collectives() {
  const int rank = paceline::get_rank();
  const int ranks = paceline::get_world_size();
  const auto show_call = [](const char* name, const char* what, const torch::Tensor& input,
                            const std::function<std::string()>& call) {
    const std::string before = text_of(input);
    show(name, what, before, call());
  };

  torch::Tensor x = numbers(2);
  show_call("broadcast", "every rank gets rank 0's tensor", x, [&] {
    paceline::broadcast(x);
    return text_of(x);
  });
  x = numbers(2);
  show_call("reduce", "rank 0 gets the sum; other tensors are undefined afterwards", x, [&] {
    paceline::reduce(x);
    return rank == 0 ? text_of(x) : "-";
  });
  x = numbers(2);
  show_call("all_reduce", "every rank gets the sum", x, [&] {
    paceline::all_reduce(x);
    return text_of(x);
  });
  x = numbers(2);
  show_call("gather", "rank 0 gets all tensors", x, [&] {
    const auto parts = rank == 0 ? empty_tensors(2) : std::vector<torch::Tensor>();
    paceline::gather(x, parts);
    return text_of(parts);
  });
  show_call("all_gather", "every rank gets all tensors", x, [&] {
    const auto parts = empty_tensors(2);
    paceline::all_gather(parts, x);
    return text_of(parts);
  });
  x = numbers(ranks);
  show_call("scatter", "rank r gets part r of rank 0's tensor", x, [&] {
    const torch::Tensor part = torch::zeros({1});
    paceline::scatter(part, rank == 0 ? x.chunk(ranks) : std::vector<torch::Tensor>());
    return text_of(part);
  });
  show_call("reduce_scatter", "rank r gets part r of the sum", x, [&] {
    const torch::Tensor part = torch::zeros({1});
    paceline::reduce_scatter_tensor(part, x);
    return text_of(part);
  });
  show_call("all_to_all", "rank r gets part r of every tensor", x, [&] {
    const torch::Tensor parts = torch::zeros({ranks});
    paceline::all_to_all_single(parts, x);
    return text_of(parts);
  });
  if (ranks == 1) return;  // a rank sends nothing to itself
  x = numbers(1);
  show_call("send, recv", "every rank sends to the next one", x, [&] {
    const torch::Tensor received = torch::zeros({1});
    auto sent = paceline::send_async(x, (rank + 1) % ranks);
    paceline::recv(received, {.src = (rank + ranks - 1) % ranks});
    sent.wait();
    return text_of(received);
  });
}

void ring() {
  const torch::Tensor x = numbers(4);
  const std::string before = text_of(x);
  const paceline::Traffic traffic = paceline::ring_all_reduce(x);
  show("ring_all_reduce", "an all_reduce by messages to the next rank, with the bytes it sends",
       before,
       text_of(x) + ", sent " + std::to_string(traffic.bytes_sent) + " bytes in " +
           std::to_string(traffic.messages_sent) + " messages");
}

// A model of two weights, and the samples of this rank.
struct Problem {
  torch::nn::Linear net{torch::nn::LinearOptions(2, 1).bias(false)};
  torch::Tensor x = torch::tensor({{1.0f, 0.0f}, {0.0f, 1.0f}, {1.0f, 1.0f}, {2.0f, 1.0f}}) +
                    paceline::get_rank();
  torch::Tensor y = torch::ones({4, 1});

  Problem() { torch::nn::init::constant_(net->weight, 0.5); }
};

torch::Tensor loss_of(const torch::Tensor& output, const torch::Tensor& target) {
  return (output - target).pow(2).mean();
}

void accumulation() {
  const Problem problem;
  auto net = problem.net;
  loss_of(net(problem.x), problem.y).backward();
  const std::string at_once = text_of(net->weight.grad());
  net->zero_grad();
  for (const int half : {0, 1}) {
    (loss_of(net(problem.x.chunk(2)[half]), problem.y.chunk(2)[half]) / 2).backward();
  }
  show("accumulation",
       "two halves of a batch, each loss divided by 2, give the gradient of the whole", at_once,
       text_of(net->weight.grad()));
}

void data_parallel() {
  const Problem problem;
  auto net = problem.net;
  loss_of(net(problem.x), problem.y).backward();
  const std::string own = text_of(net->weight.grad());
  net->zero_grad();
  paceline::DistributedDataParallel model(net);
  loss_of(model(problem.x), problem.y).backward();
  show("DistributedDataParallel", "backward averages the ranks' gradients", own,
       text_of(net->weight.grad()));
}

void parameter_server() {
  const Problem problem;
  auto net = problem.net;
  const auto make_sgd = [](std::vector<torch::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters), 0.01);
  };
  paceline::ParameterServer server(net, make_sgd);
  std::string gradient = "serves";
  if (server.is_server()) {
    server.serve();
  } else {
    loss_of(net(problem.x), problem.y).backward();
    gradient = text_of(net->weight.grad());
    server.step();
    server.leave();
  }
  show("ParameterServer", "workers push gradients and pull the weights that rank 0 has updated",
       gradient, text_of(net->weight));
}

void pipeline() {
  const int rank = paceline::get_rank();
  torch::manual_seed(static_cast<std::uint64_t>(rank));
  torch::nn::Sequential stage(torch::nn::Linear(2, 2), torch::nn::Tanh());
  paceline::Pipeline pipeline(stage, loss_of, {.n_microbatches = 4});
  pipeline.step(torch::ones({8, 2}), torch::zeros({8, 2}));
  std::string order;
  for (const auto& action : pipeline.stats().last) {
    const bool is_forward = action.kind == paceline::PipelineAction::Kind::forward;
    order += (is_forward ? " F" : " B") + std::to_string(action.microbatch);
  }
  show("Pipeline", "rank r runs layer r: forwards F and backwards B of 4 micro-batches",
       "layer " + std::to_string(rank),
       order.substr(1) + ", sent " + std::to_string(pipeline.stats().bytes_sent) + " bytes");
}

void tour() {
  const auto world = paceline::init_process_group();
  collectives();
  accumulation();
  data_parallel();
  if (paceline::get_world_size() > 1) parameter_server();
  ring();
  pipeline();
}

int main(int argc, char** argv) {
  return paceline::record([&] {
    paceline::Config config("Shows what each way to communicate does. It has no options.");
    if (const auto text = config.parse(argc, argv)) return paceline::print(*text);
    tour();
  });
}
