"""Is compression worth it for my cluster? Edit the figures, and run this file."""

from pycomm import plan


def main() -> None:
    # Sixteen machines with a GPU each on 10 Gbit/s Ethernet, and a model of 350 million parameters.
    model = plan.of_count(350_000_000, compute=0.3)
    for ranks in (2, 4, 16):
        cluster = plan.Cluster(
            ranks=ranks, inter=plan.Link.of("10gbe"), processor=plan.PROCESSORS["gpu"]
        )
        predictions = plan.predict(model, cluster)
        advice = plan.advise(cluster, predictions)
        exact = next(p for p in predictions if p.codec == "none")
        print(f"{ranks} ranks: {exact.step * 1e3:.0f} ms a step, {exact.efficiency:.0%} scaling")
        for reason in advice.why:
            print(f"  {reason}")


if __name__ == "__main__":
    main()
