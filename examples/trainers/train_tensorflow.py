"""A custom training loop of TensorFlow whose gradients pycomm averages, without torch.

It takes the place of MultiWorkerMirroredStrategy: one process for each worker, which TF_CONFIG
names as before; what changed in the loop is marked "pycomm".

    workers='{"worker": ["127.0.0.1:29500", "127.0.0.1:29501"]}'
    for index in 0 1; do
        TF_CONFIG="{\"cluster\": $workers, \"task\": {\"type\": \"worker\", \"index\": $index}}" \
            python examples/trainers/train_tensorflow.py --codec int4 &
    done; wait

`srun` and `mpirun` need no TF_CONFIG. The digits are those of scikit-learn, which need no download.
"""

import argparse
import json
import os
import statistics
import sys
import time
import zlib

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from pycomm import Communicator
from pycomm.communicator import Piece


def join() -> Communicator:
    """Join the group of TF_CONFIG's workers, who meet where the first of them is."""
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    if config:
        workers, index = config["cluster"]["worker"], config["task"]["index"]
        host, port = workers[0].rsplit(":", 1)
        os.environ |= {"RANK": str(index), "WORLD_SIZE": str(len(workers))}
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    return Communicator.from_env(timeout=60)


class Averager:
    """Averages gradients over the workers: matrices through a codec with feedback, others exactly.

    Arrays of JAX are averaged by the same lines, with numpy.array(g) in place of g.numpy().
    """

    def __init__(self, group: Communicator, codec: str, variables: list[tf.Variable]) -> None:
        self.group, self.step = group, 0
        self.coded = [len(v.shape) > 1 and codec != "none" for v in variables]
        sizes = [v.shape.num_elements() for v in variables]
        self.pieces = [
            Piece(size, codec, residual=np.zeros(size, np.float32))
            for size, coded in zip(sizes, self.coded, strict=True)
            if coded
        ]

    def __call__(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        self.step += 1
        arrays = [g.numpy() for g in gradients]
        for coded in sorted({*self.coded}):
            places = [i for i, one in enumerate(self.coded) if one is coded]
            flat = np.concatenate([arrays[i].ravel() for i in places])
            if coded:
                self.group.all_reduce_coded(flat, self.pieces, step=self.step)
            else:
                self.group.all_reduce(flat, "avg")
            ends = np.cumsum([arrays[i].size for i in places])
            for i, values in zip(places, np.split(flat, ends[:-1]), strict=True):
                arrays[i] = values.reshape(arrays[i].shape)
        return [tf.convert_to_tensor(a) for a in arrays]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", default="none", help="codec of the gradients: int8, int4, ...")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()

    group = join()  # pycomm; in place of tf.distribute.MultiWorkerMirroredStrategy()
    tf.keras.utils.set_random_seed(group.rank)  # so that workers draw different batches

    digits = load_digits()
    images = (digits.images.reshape(-1, 64) / 16).astype(np.float32)
    train = tf.data.Dataset.from_tensor_slices((images[:1500], digits.target[:1500]))
    train = train.shard(group.size, group.rank).shuffle(1500).repeat().batch(args.batch_size)

    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((64,)),
            tf.keras.layers.Dense(args.width, activation="relu"),
            tf.keras.layers.Dense(args.width, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for variable in model.trainable_variables:  # pycomm: all begin with the first worker's values
        values = variable.numpy()
        group.broadcast(values)
        variable.assign(values)
    average = Averager(group, args.codec, model.trainable_variables)  # pycomm

    @tf.function
    def gradients_of(x: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    @tf.function
    def apply(gradients: list[tf.Tensor]) -> None:
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    seconds = []
    sent = group.sent_bytes()
    for step, (x, labels) in enumerate(train.take(args.steps)):
        begin = time.perf_counter()
        loss, gradients = gradients_of(x, labels)
        apply(average(gradients))  # pycomm
        seconds.append(time.perf_counter() - begin)
        if step % 10 == 9 and group.rank == 0:
            print(f"loss {float(loss)!r}")
    sent = group.sent_bytes() - sent

    logits = model(images[1500:])
    print(f"loss of the rest {float(loss_of(digits.target[1500:], logits))!r}", flush=True)
    parameters = b"".join(v.numpy().tobytes() for v in model.trainable_variables)
    print(f"parameters {zlib.crc32(parameters):08x}, torch {'torch' in sys.modules}")
    if group.rank == 0:
        took = statistics.median(seconds)
        print(f"{sent / args.steps:.0f} bytes and {1e3 * took:.1f} ms a step, {group.describe()}")
    group.barrier()


if __name__ == "__main__":
    main()
