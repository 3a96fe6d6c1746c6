#include <paceline/paceline.h>
#include <torch/torch.h>

// A world of one, without a launcher: the calls exist, link and work.
int main() {
  return paceline::record([] {
    auto world = paceline::init_process_group();
    auto ones = torch::ones({3});
    paceline::all_reduce(ones);
    if (!ones.equal(torch::ones({3}))) throw std::runtime_error("the sum over one rank differs");
    paceline::DistributedDataParallel model(torch::nn::Linear(3, 1));
    model(ones).sum().backward();
  });
}
