// Tools that the model may call: described by hand, whose results the user writes, or of MCP
// servers, where the user allows or refuses each call.

import { $, button, el, on } from "../parts.js";
import { McpServer } from "./mcp.js";
import { pretty } from "./message.js";
import { isElsewhere, json } from "./request.js";

const SERVERS = "weft-mcp"; // addresses, for all chats of this browser

let allowed = []; // origins that this page may reach
let settings = {};
let servers = []; // McpServer
let answered = null; // called with the results of all calls
let asked = ""; // the message whose calls are shown

export const onResults = (act) => { answered = act; };

export function introduce({ mcp_origins: origins = [] }) {
	allowed = origins;
	$("mcp-about").textContent = origins.length
		? `This page may reach ${origins.join(", ")}.`
		: "This page may reach no other server: start weft with --page-mcp-origins ORIGIN.";
	if (origins.length && !servers.length) for (const url of addresses()) connect(url);
}

export function show(given) {
	settings = given;
}

const addresses = () => JSON.parse(localStorage.getItem(SERVERS) || "[]");

// The fields of a request for the tools. Raises an Error that says what is wrong.
export function fields() {
	const byHand = settings.tools ? json("list of tools", settings.tools) : [];
	if (!Array.isArray(byHand)) throw new Error("the list of tools is no list");
	const tools = byHand.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
	for (const [name, [, tool]] of offered()) tools.push({ type: "function", function: { name, description: tool.description, parameters: tool.inputSchema } });
	return tools.length ? { tools } : {};
}

// The tools of servers by the name for the model: [server, tool].
function offered() {
	const found = new Map();
	for (const server of servers) {
		for (const tool of server.tools) found.set(found.has(tool.name) ? `${new URL(server.url).hostname.replaceAll(/\W/g, "_")}_${tool.name}` : tool.name, [server, tool]);
	}
	return found;
}

// ---- servers

async function connect(url, key) {
	const server = new McpServer(url, key);
	drop(url);
	servers.push(server);
	draw();
	try {
		if (!allowed.includes(new URL(url).origin)) throw new Error(`this page may not reach ${new URL(url).origin}: start weft with --page-mcp-origins ${new URL(url).origin}`);
		await server.open();
		server.state = `${server.tools.length} tools: ${server.tools.map((tool) => tool.name).join(", ")}`;
	} catch (error) {
		server.state = error instanceof TypeError ? `${url} is no address` : error.message;
	}
	keep();
}

function keep() {
	localStorage.setItem(SERVERS, JSON.stringify(servers.map((one) => one.url)));
	draw();
}

function drop(url) {
	for (const one of servers) if (one.url === url) one.close();
	servers = servers.filter((one) => one.url !== url);
}

function draw() {
	$("mcp-list").replaceChildren(...servers.map((server) => el("li", "", el("b", "", server.url), " ", el("span", "", server.state || "connecting…"), " ", button("Remove", () => {
		drop(server.url);
		keep();
	}))));
}

on("mcp-form", "submit", (event) => {
	event.preventDefault();
	const url = $("mcp-url").value.trim();
	if (url) connect(url, $("mcp-key").value.trim());
	$("mcp-url").value = $("mcp-key").value = "";
});

// ---- calls

// Asks for the results of the calls of a message, if it is the last one of the path.
export function ask(node) {
	const hasEnded = node.end && !node.error && !isElsewhere(node);
	const calls = node.role === "assistant" && hasEnded ? node.calls || [] : [];
	const box = $("call-forms");
	if (!calls.length) {
		asked = "";
		return box.replaceChildren();
	}
	if (asked === node.id) return;
	asked = node.id;
	const results = new Map();
	const finish = (i, text) => {
		results.set(i, text);
		if (results.size < calls.length) return;
		asked = "";
		box.replaceChildren();
		answered(calls.map(({ id, name }, at) => ({ call: id, name, text: results.get(at) })));
	};
	box.replaceChildren(...calls.map((call, i) => form(call, (text) => finish(i, text))));
	box.querySelector("textarea, button")?.focus({ preventScroll: true });
}

function form(call, finish) {
	const found = offered().get(call.name);
	const box = el("form", "call-form", el("p", "", el("b", "", call.name), found ? ` of ${found[0].url}` : " waits for your answer"), el("pre", "", pretty(call.args)));
	const done = (text) => {
		box.replaceChildren(el("p", "", el("b", "", call.name), " has its result"));
		finish(text);
	};
	const refuse = () => done("The user did not allow this call.");
	if (found) box.append(el("div", "acts", button("Allow this call", () => allow(found, call, box, done), "do"), button("Refuse", refuse)));
	else {
		const area = Object.assign(el("textarea"), { rows: 2, ariaLabel: `Result of ${call.name}`, placeholder: "The result, for example JSON" });
		box.append(area, el("div", "acts", el("button", "do", "Send the result"), button("Refuse", refuse)));
		box.addEventListener("submit", () => done(area.value));
	}
	box.addEventListener("submit", (event) => event.preventDefault());
	return box;
}

async function allow([server, tool], call, box, done) {
	const ending = new AbortController();
	const end = button("End the call", () => ending.abort());
	box.querySelector(".acts").replaceChildren(el("span", "so", "runs…"), end);
	end.focus({ preventScroll: true });
	try {
		done(await server.call(tool.name, json("call's arguments", call.args || "{}"), ending.signal));
	} catch (error) {
		done("error: " + error.message);
	}
}
