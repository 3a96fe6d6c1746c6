// Not a program: the compiler must refuse each of these in one sentence, which says what to write
// instead. A comment at a line's end is a part of that sentence.
#include <torch/torch.h>

#include <paceline/paceline.h>

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) { return x; }
};
TORCH_MODULE(Net);

void save_the_wrapper(paceline::DistributedDataParallel<NetImpl>& model) {
  torch::save(model, "model.pt");  // torch::save(model.module(), path) on rank 0
}

void load_the_wrapper(paceline::DistributedDataParallel<NetImpl>& model) {
  torch::load(model, "model.pt");  // torch::load(module, path) before wrapping it
}

void wrap_a_value(NetImpl& net) {
  const paceline::DistributedDataParallel model(net);  // hold it by std::make_shared
}

void wrap_a_value_with_options() {
  const torch::nn::LinearImpl layer(2, 2);
  const paceline::DistributedDataParallel<torch::nn::LinearImpl> model(  // TORCH_MODULE's holder
      layer, {.static_graph = true});
}

void forget_the_forward(const at::Tensor& w) {
  const paceline::DistributedDataParallel model({{"w", w}});  // needs the model's forward
}

void ask_for_a_module(const at::Tensor& w) {
  paceline::DistributedDataParallel model({{"w", w}}, [&](const at::Tensor& x) { return x * w; });
  model.module();  // has no module()
  model.eval();    // evaluate under torch::NoGradGuard
  model(w, 3);     // does not take these arguments
}

void wrap_what_is_no_model(const std::unique_ptr<NetImpl>& net) {
  const paceline::DistributedDataParallel model(
      net);  // in a std::shared_ptr or in a TORCH_MODULE's
}

void move_the_wrapper(paceline::DistributedDataParallel<NetImpl>& model) {
  model->to(at::kDouble);  // move the module, then wrap it
}

void convert_a_script(torch::jit::Module& script) {
  paceline::convert_sync_batchnorm(script);  // build the model of torch::nn modules
}

void spawn_with_other_arguments() {
  paceline::spawn([](int, const std::string&) {}, {.nprocs = 2}, 5);  // must take an int
}

void map_by_a_function_of_something_else(const paceline::data::TensorDataset<1>& set) {
  paceline::data::map(set, [](int) {});  // must take a sample, or a sample and an at::Generator&
}

void pipeline_with_another_loss(const std::shared_ptr<NetImpl>& net) {
  paceline::Pipeline pipeline(net, [](int) { return at::Tensor(); });  // takes the last stage's
}
