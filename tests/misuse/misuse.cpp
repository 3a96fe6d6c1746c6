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

void name_the_holder() {
  using Model = paceline::DistributedDataParallel<Net>;
  static_cast<void>(sizeof(Model));  // DistributedDataParallel<NetImpl>, if Net is a TORCH_MODULE
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

struct CopiedImpl : torch::nn::Cloneable<CopiedImpl> {
  void reset() override {}
  std::string forward(torch::Tensor x) { return x.toString(); }
};

void save_data_parallel(paceline::DataParallel<CopiedImpl>& model) {
  torch::save(model, "model.pt");  // torch::save(model.module(), path)
}

void load_data_parallel(paceline::DataParallel<CopiedImpl>& model) {
  torch::load(model, "model.pt");  // auto module = model.module()
}

void replicate_what_has_no_clone() {
  const paceline::DataParallel model(Net{}, {.num_replicas = 2});  // derive it from torch::nn::Clon
}

void replicate_a_value(CopiedImpl& net) {
  const paceline::DataParallel model(net);  // DataParallel shares its module: hold it by
}

void replicate_what_is_no_module(const at::Tensor& w) {
  const paceline::DataParallel model(w);  // replicates a torch::nn::Module in a std::shared_ptr
}

void name_the_holder(const Net& net) {
  const paceline::DataParallel<Net> model(net);  // whose name ends with Impl
}

void replicate_by_a_function_of_something_else() {
  const paceline::DataParallel<CopiedImpl> model([] { return 5; },
                                                 2);  // returns std::shared_ptr<M>
}

void pass_other_arguments(paceline::DataParallel<CopiedImpl>& model, const at::Tensor& x) {
  model(x, 3);  // or the function passed to parallel_apply after its module
}

void gather_what_is_no_tensor(paceline::DataParallel<CopiedImpl>& model, const at::Tensor& x) {
  model(x);  // gathers tensors: this forward or function returns something else
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
  paceline::Pipeline pipeline(net, [](int) { return at::Tensor(); });  // or a std::vector of its
}
