"""A page of plain English, on which a model can be measured where no text is at hand."""

SAMPLE_TEXT = """\
A river does not know where it is going, and yet it arrives. In the hills it is a narrow thing, quick and cold, and a
child can step across it. Further down it slows, takes in other streams, and begins to carry boats. The people of the
valley have built their towns beside it for a thousand years, because water turns the mills, waters the fields and
brings the fish; and now and then, in a wet spring, it also comes into the houses. Then everyone carries chairs
upstairs, and complains, and stays.

Engineers have tried to make the river straight. A straight river is shorter and takes up less land, so that more wheat
can be grown; but it also runs faster, digs its bed deeper, and sends the flood to the next town in half the time. What
was saved in one place was paid for in another. After some decades they began to put the bends back. They moved the
banks apart, planted willows, and let the meadows flood as they had before. The water now takes two days to pass where
it once took one, and the town below has had no flood since.

There is a lesson in this that is not only about rivers. A system that is measured by one number will be made good at
that number. If the number is speed, it will be fast, and something that nobody counted will become worse. It helps to
ask, before anything is made straight, what the bends were for. Sometimes they were for nothing, and can go. Often they
held the water back for a while, so that it came down slowly, and in many small portions, to people who could use it.

In the evening the children of the town go to the bridge and throw sticks into the water on one side, run across the
road, and wait to see whose stick comes out first on the other. Nobody has ever found a way to win every time. The
fastest water is in the middle, but the middle moves; after rain it lies near the left bank, in summer near the right.
The oldest girl keeps a list of the winners in a small green book. She says that with enough evenings one could learn
where to stand. Her brother says that by then they will all have grown up, and that this is the point of the game.
"""
