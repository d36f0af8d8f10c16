// A recording: the same pictures, made from a journal or by a simulation, at any of its steps.

import { $, num, plural, reason } from "./parts.js";

const PLAY_MS = 120;

export class Film {
	// `show(picture)` draws one; `tree` and all else as in the live page.
	constructor(show) {
		this.show = show;
		this.at = 0; // index of the frame
		this.timer = 0;
		this.wanted = -1;
	}

	async open() {
		const answer = await fetch("film");
		if (!answer.ok) throw new Error(await reason(answer));
		this.facts = await answer.json();
		$("film").hidden = false;
		$("film-at").max = Math.max(this.facts.frames.length - 1, 0);
		$("film-at").addEventListener("input", () => { this.halt(); this.go(Number($("film-at").value)); });
		$("film-back").addEventListener("click", () => { this.halt(); this.go(this.at - 1); });
		$("film-on").addEventListener("click", () => { this.halt(); this.go(this.at + 1); });
		$("film-play").addEventListener("click", () => (this.timer ? this.halt() : this.play()));
		return this.facts;
	}

	// The frame at a step, or the last one before it.
	seek(step) {
		const frames = this.facts.frames;
		let found = 0;
		for (let i = 0; i < frames.length && frames[i].step <= step; i++) found = i;
		this.halt();
		this.go(found);
	}

	async go(index) {
		const frames = this.facts.frames;
		if (!frames.length) return;
		this.wanted = Math.min(Math.max(index, 0), frames.length - 1);
		if (this.isBusy) return;
		this.isBusy = true;
		try {
			while (this.wanted >= 0) {
				const next = this.wanted;
				this.wanted = -1;
				const answer = await fetch("film/" + next);
				if (!answer.ok) throw new Error(await reason(answer));
				const picture = await answer.json();
				this.at = next;
				$("film-at").value = next;
				this.show(picture);
				this.tell();
			}
		} finally {
			this.isBusy = false;
		}
	}

	tell() {
		const { frames } = this.facts;
		const frame = frames[this.at];
		const words = `step ${num(frame.step)} of ${num(frames.at(-1).step)} · ${frame.at_s.toFixed(3)} s`;
		$("film-text").textContent = words + (this.facts.stride > 1 ? ` · every ${this.facts.stride}th` : "");
		$("film-at").setAttribute("aria-valuetext", words);
	}

	play() {
		$("film-play").textContent = "Stop";
		$("film-play").setAttribute("aria-pressed", "true");
		const turn = async () => {
			if (!this.timer) return;
			if (this.at >= this.facts.frames.length - 1) { this.halt(); return; }
			await this.go(this.at + 1);
			if (this.timer) this.timer = setTimeout(turn, PLAY_MS);
		};
		this.timer = setTimeout(turn, 0);
	}

	halt() {
		clearTimeout(this.timer);
		this.timer = 0;
		$("film-play").textContent = "Play";
		$("film-play").setAttribute("aria-pressed", "false");
	}

	async story(rid) {
		const answer = await fetch("requests/" + encodeURIComponent(rid));
		if (!answer.ok) throw new Error(await reason(answer));
		return (await answer.json()).requests;
	}

	words() {
		return `${this.facts.title}: ${plural(this.facts.frames.length, "picture")}`;
	}
}
