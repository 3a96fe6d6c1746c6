#include <torch/torch.h>

int main() {
  torch::nn::Linear layer(3, 1);
  layer(torch::ones({3})).sum().backward();
  return layer->weight.grad().equal(torch::ones({1, 3})) ? 0 : 1;
}
