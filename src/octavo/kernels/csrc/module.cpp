// The Python module: what it has, and by which names.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bound_kernels.hpp"
#include "philox.hpp"

namespace nb = nanobind;
using namespace octavo;

namespace {

// From [0, 1), 53 bits of the first word of Philox: one for each counter and key.
void uniform_numbers(const CUL1& counters, const CUL1& keys, uint64_t second_key, const D1& out) {
  require(counters.shape(0) == keys.shape(0) && out.shape(0) == keys.shape(0), "counters, keys and out must have the same length");
  for (size_t i = 0; i < keys.shape(0); i++)
    out.data()[i] = static_cast<double>(philox(counters.data()[i], keys.data()[i], second_key) >> 11) * 0x1p-53;
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("supported_instruction_sets", [] {
    nb::list names;
    for (const KernelTable* table : supported_tables()) names.append(table->name);
    return names;
  });
  nb::class_<Linear>(m, "Linear")
      .def_prop_ro("num_outputs", [](const Linear& l) { return l.weights.num_outputs; })
      .def_prop_ro("num_inputs", [](const Linear& l) { return l.weights.num_inputs; })
      .def_prop_ro("num_bytes", [](const Linear& l) { return l.num_bytes; })
      .def_prop_ro("weights_dtype", [](const Linear& l) { return name_of(l.weights.dtype); });
  nb::class_<KVView>(m, "KVView");
  m.def("uniform", &uniform_numbers, nb::arg("counters"), nb::arg("keys"), nb::arg("second_key"), nb::arg("out").noconvert());
  nb::class_<BatchView>(m, "BatchView");
  m.def("make_batch_view", &make_batch_view, nb::arg("query_start"), nb::arg("start_slot"), nb::arg("start_position"),
        nb::arg("block_table"), nb::arg("tail_table").none());
  m.def("make_kv_view", &make_kv_view, nb::arg("pool").noconvert(), nb::arg("block_bytes"), nb::arg("layer_offset"), nb::arg("block_size"),
        nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("kv_format"), nb::arg("kind"), nb::arg("k_scales").none(), nb::arg("v_scales").none(),
        nb::arg("k_means").none(), nb::arg("is_turned"), nb::arg("k_feedback").none(), nb::arg("tail_offset"));
  nb::class_<LayerStack>(m, "LayerStack")
      .def(nb::init<>())
      .def("add", &LayerStack::add, nb::arg("attention_norm"), nb::arg("eps"), nb::arg("qkv"), nb::arg("q_norm").none(),
           nb::arg("k_norm").none(), nb::arg("output"), nb::arg("post_attention_norm").none(), nb::arg("mlp_norm"), nb::arg("gate_up"),
           nb::arg("down"), nb::arg("post_mlp_norm").none(), nb::arg("gate"), nb::arg("scale"), nb::arg("window"), nb::arg("softcap"),
           nb::arg("kv"), nb::arg("table"), nb::arg("rope"), nb::keep_alive<1, 4>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 10>(),
           nb::keep_alive<1, 11>(), nb::keep_alive<1, 17>());
  nb::class_<Kernels>(m, "Kernels")
      .def(nb::init<int, const std::string&, int>(), nb::arg("num_threads"), nb::arg("instruction_set"), nb::arg("spin_pauses"))
      .def_prop_ro("instruction_set", &Kernels::instruction_set)
      .def_prop_ro("num_threads", &Kernels::num_threads)
      .def_prop_ro("scratch_bytes", &Kernels::scratch_bytes)
      .def("pack_linear", &Kernels::pack, nb::arg("weight"), nb::arg("bias").none(), nb::arg("weights_dtype"))
      .def("pack_blocks", &Kernels::pack_rows_of_blocks, nb::arg("blocks"), nb::arg("bias").none(), nb::arg("kind"))
      .def("linear", &Kernels::linear, nb::arg("x"), nb::arg("weight"), nb::arg("out").noconvert(), nb::arg("accumulate"))
      .def("embedding", &Kernels::embedding, nb::arg("table"), nb::arg("token_ids"), nb::arg("out").noconvert())
      .def("rms_norm", &Kernels::rms_norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out").noconvert(),
           nb::arg("accumulate"))
      .def("silu_mul", &Kernels::silu_mul, nb::arg("gate_up"), nb::arg("out").noconvert())
      .def("layer_norm", &Kernels::layer_norm, nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(), nb::arg("eps"), nb::arg("out").noconvert())
      .def("activation", &Kernels::activation, nb::arg("x"), nb::arg("kind"), nb::arg("out").noconvert())
      .def("gated_activation", &Kernels::gated_activation, nb::arg("gate_up"), nb::arg("kind"), nb::arg("limit"), nb::arg("out").noconvert())
      .def("softmax", &Kernels::softmax, nb::arg("x"), nb::arg("out").noconvert())
      .def("soft_cap", &Kernels::soft_cap, nb::arg("x"), nb::arg("cap"), nb::arg("out").noconvert())
      .def("rotate", &Kernels::rotate, nb::arg("heads").noconvert(), nb::arg("positions"), nb::arg("cos"), nb::arg("sin"), nb::arg("first"))
      .def("rope_write", &Kernels::rope_write, nb::arg("qkv"), nb::arg("batch"), nb::arg("cos"), nb::arg("sin"), nb::arg("kv"),
           nb::arg("out_q").noconvert(), nb::arg("q_norm").none(), nb::arg("k_norm").none(), nb::arg("norm_eps"))
      .def("attention_input", &Kernels::attention_input, nb::arg("x"), nb::arg("norm"), nb::arg("eps"), nb::arg("qkv"), nb::arg("batch"),
           nb::arg("cos"), nb::arg("sin"), nb::arg("kv"), nb::arg("out_q").noconvert(), nb::arg("q_norm").none(), nb::arg("k_norm").none())
      .def("norm_linear", &Kernels::norm_linear_into, nb::arg("x"), nb::arg("norm"), nb::arg("eps"), nb::arg("weight"),
           nb::arg("out").noconvert())
      .def("gated_mlp", &Kernels::gated_mlp, nb::arg("hidden").noconvert(), nb::arg("norm"), nb::arg("eps"), nb::arg("gate_up"), nb::arg("down"),
           nb::arg("gate"), nb::arg("post_norm").none())
      .def("decoder_layers", &Kernels::decoder_layers, nb::arg("stack"), nb::arg("count"), nb::arg("hidden").noconvert(), nb::arg("tables"),
           nb::arg("ropes"), nb::arg("heads").noconvert())
      .def("paged_attention", &Kernels::paged_attention, nb::arg("q"), nb::arg("batch"), nb::arg("kv"), nb::arg("scale"),
           nb::arg("out").noconvert(), nb::arg("window"), nb::arg("softcap"), nb::arg("sinks").none())
      .def("attention_mass", &Kernels::attention_mass, nb::arg("q"), nb::arg("batch"), nb::arg("kv"), nb::arg("scale"),
           nb::arg("sequence"), nb::arg("first_row"), nb::arg("mass").noconvert())
      .def("latent_write", &Kernels::latent_write, nb::arg("latent"), nb::arg("batch"), nb::arg("kv"))
      .def("latent_attention", &Kernels::latent_attention, nb::arg("q"), nb::arg("batch"), nb::arg("kv"), nb::arg("rank"), nb::arg("scale"),
           nb::arg("out").noconvert())
      .def("draw", &Kernels::draw, nb::arg("logits"), nb::arg("rows"), nb::arg("settings"), nb::arg("must_be_finite"),
           nb::arg("out").noconvert())
      .def("copy_blocks", &Kernels::copy_blocks, nb::arg("pool").noconvert(), nb::arg("block_bytes"), nb::arg("sources"), nb::arg("targets"));
}
